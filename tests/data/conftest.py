from tests.data.object_stores import gcs, s3, s3_url
from tests.data.trees import nasty

__all__ = ["gcs", "nasty", "s3", "s3_url"]
