"""This file lists the public names of raydali, and where each one is defined.

`from raydali import NAME` imports the module behind a name at that moment, see __init__.py. Jobs, copies of jobs and
training loops of your own need no other module of raydali, so that files may move within it.
"""

# Errors and messages
from raydali.errors import DataError as DataError
from raydali.errors import StorageAway as StorageAway
from raydali.errors import UsageError as UsageError
from raydali.extras import require_extra as require_extra
from raydali.text import plural as plural

# From Python and notebooks
from raydali.commands.from_python import Run as Run
from raydali.commands.from_python import train as train

# Data: what the samples are
from raydali.data.broken.quarantine import Quarantine as Quarantine
from raydali.data.builtin.blurred import blurred_folder as blurred_folder
from raydali.data.builtin.digits import digits_folder as digits_folder
from raydali.data.builtin.moving_discs import moving_discs_folder as moving_discs_folder
from raydali.data.builtin.shapes import masked_shapes_folder as masked_shapes_folder
from raydali.data.builtin.shapes import shapes_folder as shapes_folder
from raydali.data.index.coco import Coco as Coco
from raydali.data.index.coco_folder import train_and_val as _open_coco
from raydali.data.index.exclusion import exclude as exclude
from raydali.data.index.files import Files as Files
from raydali.data.index.files import absolute as absolute
from raydali.data.index.formats import labeled_images as labeled_images
from raydali.data.index.formats import train_and_val as _open_labeled
from raydali.data.index.image_pairs import ImagePairs as ImagePairs
from raydali.data.index.image_pairs import in_splits as _open_pairs
from raydali.data.index.labeled import LabeledFiles as LabeledFiles
from raydali.data.index.labeled import LabeledSource as LabeledSource
from raydali.data.index.list_lines import read_lines as read_lines
from raydali.data.index.masked_images import IGNORED as IGNORED
from raydali.data.index.masked_images import MaskedImages as MaskedImages
from raydali.data.index.masked_images import train_and_val as _open_masked
from raydali.data.index.source import TrainAndVal as TrainAndVal
from raydali.data.read.reading import reading as reading
from raydali.data.read.reading import timed as timed
from raydali.data.video.clips import VideoClips as VideoClips
from raydali.data.video.clips import check_clips as check_clips
from raydali.data.video.clips import scan_videos as scan_videos

# Pipelines: what tensors are made of a sample
from raydali.data.stream.counter_rng import uniforms as uniforms
from raydali.data.tasks.classification import TrainImages as TrainImages
from raydali.data.tasks.classification import ValidationImages as ValidationImages
from raydali.data.tasks.detection import TrainImages as _TrainBoxes
from raydali.data.tasks.detection import ValidationImages as _ValidationBoxes
from raydali.data.tasks.pipeline import Inputs as Inputs
from raydali.data.tasks.pipeline import Pipeline as Pipeline
from raydali.data.tasks.pipeline import Samples as Samples
from raydali.data.tasks.restoration import TrainPairs as TrainPairs
from raydali.data.tasks.restoration import ValidationPairs as ValidationPairs
from raydali.data.tasks.segmentation import TrainImages as _TrainMasks
from raydali.data.tasks.segmentation import ValidationImages as _ValidationMasks
from raydali.data.tasks.settings import KINETICS as KINETICS
from raydali.data.tasks.settings import KINETICS_MEAN as KINETICS_MEAN
from raydali.data.tasks.settings import KINETICS_STD as KINETICS_STD
from raydali.data.video.task import TrainClips as TrainClips
from raydali.data.video.task import ValidationClips as ValidationClips

# The order of the samples, and their batches
from raydali.data.load.loader import Loader as Loader
from raydali.data.load.make import make_loader as make_loader
from raydali.data.load.make import make_video_loader as make_video_loader
from raydali.data.stream.stream import OrderedPass as OrderedPass
from raydali.data.stream.stream import Stream as Stream
from raydali.own_loop import measured as measured

# Options of jobs
from raydali.options.placement import Bounds as Bounds
from raydali.options.every_job import ImageOptions as ImageOptions
from raydali.options.placement import require as require
from raydali.options.splitting import SplitOptions as SplitOptions
from raydali.options.splitting import require_data as require_data
from raydali.options.subjects import AugmentationOptions as AugmentationOptions
from raydali.options.subjects import ClassifierOptions as ClassifierOptions
from raydali.options.subjects import FineTuningOptions as FineTuningOptions
from raydali.options.subjects import LabeledDataOptions as LabeledDataOptions
from raydali.options.subjects import MultiLabelOptions as MultiLabelOptions
from raydali.options.subjects import RecipeOptions as RecipeOptions
from raydali.options.subjects import RegularizationOptions as RegularizationOptions
from raydali.options.subjects import ScheduleOptions as ScheduleOptions
from raydali.options.subjects import StartingWeightsOptions as StartingWeightsOptions
from raydali.options.subjects import WeightsOptions as WeightsOptions
from raydali.training.learning_rates import PEAKS as PEAKS

# Networks and losses
from raydali.training.evaluation.restoration import RestorationNetwork as RestorationNetwork
from raydali.training.evaluation.restoration import charbonnier as charbonnier
from raydali.training.evaluation.segmentation import balanced_weights as _balanced_pixel_weights
from raydali.training.evaluation.segmentation import segmentation_loss as segmentation_loss
from raydali.training.losses import classification_loss as classification_loss
from raydali.training.losses import mixing as mixing
from raydali.training.models.classification import build_model as _build_classifier
from raydali.training.models.classification import build_video_model as build_video_model
from raydali.training.models.classification import check_sizes as check_sizes
from raydali.training.models.classification import check_video_model as check_video_model
from raydali.training.models.classification import has_one_size as has_one_size
from raydali.training.models.detection import DetectorNetwork as DetectorNetwork
from raydali.training.models.detection import build_detector as build_detector
from raydali.training.models.detection import check_detector as check_detector
from raydali.training.models.detection import constant_parts as constant_parts
from raydali.training.models.detection import detection_loss as detection_loss
from raydali.training.models.normalized import Normalized as Normalized
from raydali.training.models.segmentation import WithAuxiliary as WithAuxiliary
from raydali.training.models.segmentation import build as _build_segmenter
from raydali.training.models.segmentation import check_segmenter as check_segmenter

# The training loop
from raydali.launch.worker.session import Session as Session
from raydali.launch.worker.training_run import TrainingRun as TrainingRun
from raydali.training.optim import MovingAverage as MovingAverage
from raydali.training.optim import build_optimizer as build_optimizer
from raydali.training.optim import learning_rate as learning_rate
from raydali.training.optim import set_learning_rate as set_learning_rate

# Validation and predictions
from raydali.report.comparison_grid import Examples as Examples
from raydali.training.evaluation.classification import evaluate as _evaluate_classifier
from raydali.training.evaluation.classification import evaluate_labels as evaluate_labels
from raydali.training.evaluation.detection import evaluate as _evaluate_detector
from raydali.training.evaluation.restoration import evaluate as _evaluate_restoration
from raydali.training.evaluation.restoration import restore as restore
from raydali.training.evaluation.restoration import restored_files as restored_files
from raydali.training.evaluation.segmentation import evaluate as _evaluate_segmenter
from raydali.training.evaluation.segmentation import mask_files as mask_files
from raydali.training.evaluation.validation import ValidationPass as ValidationPass
from raydali.training.evaluation.validation import evaluating as evaluating
from raydali.training.evaluation.validation import require_read as require_read

# Commands, and trained runs
from raydali.inference.trained_run import open_run as open_run
from raydali.launch.driver.command import run_job as run_job
from raydali.launch.driver.command import run_main as run_main
from raydali.launch.job import Job as Job

# Public under other names than their modules have, where several modules have the same
TrainBoxes = _TrainBoxes
TrainMasks = _TrainMasks
ValidationBoxes = _ValidationBoxes
ValidationMasks = _ValidationMasks
balanced_pixel_weights = _balanced_pixel_weights
build_classifier = _build_classifier
build_segmenter = _build_segmenter
evaluate_classifier = _evaluate_classifier
evaluate_detector = _evaluate_detector
evaluate_restoration = _evaluate_restoration
evaluate_segmenter = _evaluate_segmenter
open_coco = _open_coco
open_labeled = _open_labeled
open_masked = _open_masked
open_pairs = _open_pairs
