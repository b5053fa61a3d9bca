"""All of the GPU's queues, as workers have them: to be asked for before CUDA is in use."""

import os

from raydali.host.hardware import HARDWARE_QUEUES, QUEUES_VARIABLE

os.environ[QUEUES_VARIABLE] = str(HARDWARE_QUEUES)
