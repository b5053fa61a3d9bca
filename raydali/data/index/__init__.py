"""Indexes of samples: files, lists, shards, COCO, YOLO, pairs and masks, on local disks and in object stores."""
