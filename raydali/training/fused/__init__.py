"""BatchNorm, addition and ReLU as one operation in compiled models."""
