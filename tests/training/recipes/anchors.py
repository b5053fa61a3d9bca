"""The published trainings behind the recipes, typed by hand in the options of their own scripts.

A table has every option of its source that decides what is learned and that raydali has a setting for, or follows
otherwise. `gpus` is the number of processes that the source starts.
"""

from collections.abc import Mapping

Table = Mapping[str, object]

# https://github.com/pytorch/vision/issues/3995#issuecomment-1013906621, and the defaults of
# references/classification/train.py at commit 0d29db341ca17005bc4fcafa3c9b7da2fd1f1672, with --ra-reps of pull request
# 5084, which precedes the comment.
TORCHVISION_V2: Table = {
    "gpus": 8,
    "--model": "resnet50",
    "--batch-size": 128,
    "--epochs": 600,
    "--opt": "sgd",
    "--lr": 0.5,
    "--momentum": 0.9,
    "--weight-decay": 2e-5,
    "--norm-weight-decay": 0.0,
    "--label-smoothing": 0.1,
    "--mixup-alpha": 0.2,
    "--cutmix-alpha": 1.0,
    "--lr-scheduler": "cosineannealinglr",
    "--lr-warmup-epochs": 5,
    "--lr-warmup-decay": 0.01,
    "--sync-bn": False,
    "--auto-augment": "ta_wide",
    "--random-erase": 0.1,
    "--amp": False,
    "--model-ema": True,
    "--model-ema-steps": 32,
    "--model-ema-decay": 0.99998,
    "--interpolation": "bilinear",
    "--val-resize-size": 232,
    "--val-crop-size": 224,
    "--train-crop-size": 176,
    "--clip-grad-norm": None,
    "--weights": None,
    "--ra-sampler": True,
    "--ra-reps": 4,
}

# Wightman et al., "ResNet strikes back", https://arxiv.org/abs/2110.00476v1, table 2, in the options of timm's train.py
# at commit aa4b5850c1543fa488abf260f18390eda46cf85d of https://github.com/huggingface/pytorch-image-models. The table
# does not have --warmup-lr, --min-lr, --bce-target-thresh, --train-interpolation and what follows them.
A1: Table = {
    "gpus": 4,
    "--model": "resnet50",
    "--img-size": 224,
    "--crop-pct": 0.95,
    "--epochs": 600,
    "--batch-size": 512,
    "--opt": "lamb",
    "--lr": 5e-3,
    "--sched": "cosine",
    "--weight-decay": 0.01,
    "--warmup-epochs": 5,
    "--smoothing": 0.1,
    "--drop-path": 0.05,
    "--aug-repeats": 3,
    "--clip-grad": None,
    "--hflip": 0.5,
    "--scale": (0.08, 1.0),
    "--aa": "rand-m7-mstd0.5-inc1",
    "--mixup": 0.2,
    "--cutmix": 1.0,
    "--reprob": 0.0,
    "--model-ema": False,
    "--bce-loss": True,
    "--amp": True,
    "--warmup-lr": 1e-4,
    "--min-lr": 1e-6,
    "--bce-target-thresh": 0.2,
    "--train-interpolation": "random",
    "--interpolation": "bicubic",
    "--sync-bn": False,
    "--warmup-prefix": False,
    "--sched-on-updates": False,
}
A2: Table = {**A1, "--epochs": 300, "--weight-decay": 0.02, "--smoothing": 0.0, "--mixup": 0.1}
A3: Table = {
    **A2,
    "--img-size": 160,
    "--epochs": 100,
    "--lr": 8e-3,
    "--drop-path": 0.0,
    "--aug-repeats": 0,
    "--aa": "rand-m6-mstd0.5-inc1",
}

# https://github.com/libffcv/ffcv-imagenet at commit 4dd291a122096a2032ec9fd19633e1b9aff3577d: rn50_16_epochs.yaml and
# rn50_88_epochs.yaml in rn50_configs/, the defaults of train_imagenet.py, and the data set of README.md. The loader's
# batch size is that of a process: ffcv/loader/loader.py of https://github.com/libffcv/ffcv at commit
# 02b525bce96c07bd0657ae59de27d8ff76db8de5.
FFCV_16: Table = {
    "write_imagenet.sh": "500 0.50 90",
    "dist.world_size": 8,
    "lr.lr": 1.7,
    "lr.lr_schedule_type": "cyclic",
    "lr.lr_peak_epoch": 2,
    "model.arch": "resnet50",
    "model.pretrained": 0,
    "resolution.start_ramp": 11,
    "resolution.end_ramp": 13,
    "resolution.min_res": 160,
    "resolution.max_res": 192,
    "training.batch_size": 512,
    "training.bn_wd": 0,
    "training.epochs": 16,
    "training.label_smoothing": 0.1,
    "training.momentum": 0.9,
    "training.optimizer": "sgd",
    "training.weight_decay": 0.0001,
    "training.use_blurpool": 1,
    "validation.lr_tta": True,
    "validation.resolution": 256,
}
FFCV_88: Table = {**FFCV_16, "training.epochs": 88, "resolution.start_ramp": 65, "resolution.end_ramp": 76}

# https://github.com/facebookresearch/deit at commit 7e160fe43f0252d17191b71cbb5826254114ea5b: the command for
# ImageNet-1k in README_revenge.md, and the defaults of main.py.
DEIT3_S: Table = {
    "gpus": 8,
    "--batch-size": 256,
    "--epochs": 800,
    "--bce-loss": True,
    "--model": "deit_small_patch16_LS",
    "--input-size": 224,
    "--drop-path": 0.05,
    "--model-ema": True,
    "--model-ema-decay": 0.99996,
    "--opt": "fusedlamb",
    "--opt-eps": 1e-8,
    "--clip-grad": None,
    "--weight-decay": 0.05,
    "--sched": "cosine",
    "--lr": 4e-3,
    "--warmup-lr": 1e-6,
    "--min-lr": 1e-5,
    "--warmup-epochs": 5,
    "--color-jitter": 0.3,
    "--smoothing": 0.0,
    "--train-interpolation": "bicubic",
    "--repeated-aug": True,
    "--ThreeAugment": True,
    "--reprob": 0.0,
    "--mixup": 0.8,
    "--cutmix": 1.0,
    "--finetune": "",
    "--attn-only": False,
    "--eval-crop-ratio": 1.0,
}
