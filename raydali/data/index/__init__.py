"""Indexes of samples: files, lists, shards, COCO, pairs and masks, on local disks and in object stores."""
