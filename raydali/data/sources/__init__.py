"""The sources of samples: files, lists, shards, COCO, pairs and videos, on local disks and in object stores."""
