from tests.data.object_stores import gcs, s3, s3_url

__all__ = ["gcs", "s3", "s3_url"]
