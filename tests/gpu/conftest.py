"""All of the GPU's queues, as workers have them: to be asked for before CUDA is in use."""

import os

from raydali.host.cuda_queues import HARDWARE_QUEUES, VARIABLE

os.environ[VARIABLE] = str(HARDWARE_QUEUES)
