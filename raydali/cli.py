"""The `raydali` command.

A subcommand is a dataclass of options with a function `main(options)` beside it. Neither torch nor Ray nor DALI is
imported here or where such a dataclass stands, so that --help answers at once.

0    done
1    something failed: what it was comes last
2    bad usage: one line that names the value, the limit and the remedy
130  interrupted
"""

import sys
from collections.abc import Sequence

from tyro.extras import SubcommandApp

from raydali.bench.loader_bench import LoaderBench
from raydali.bench.results import BenchFailed
from raydali.bench.scale_bench import ScaleBench
from raydali.bench.strategies_bench import StrategiesBench
from raydali.bench.train_bench import TrainBench
from raydali.bench.video_bench import VideoBench
from raydali.doctor.command import Doctor
from raydali.errors import DataError, UsageError
from raydali.local_cluster.command import Down, Status, Up
from raydali.preview import Preview
from raydali.report.command import Report


def main(args: Sequence[str] | None = None) -> None:
    """Parse the command line, run the subcommand and leave with its exit code."""
    options = _commands().cli(prog="raydali", description="Ray Train jobs fed by NVIDIA DALI.", args=args)
    try:
        sys.modules[type(options).__module__].main(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (BenchFailed, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _commands() -> SubcommandApp:
    bench = SubcommandApp()
    bench.command(name="loader")(LoaderBench)
    bench.command(name="scale")(ScaleBench)
    bench.command(name="strategies")(StrategiesBench)
    bench.command(name="train")(TrainBench)
    bench.command(name="video")(VideoBench)
    app = SubcommandApp()
    app.command(bench, name="bench", help="Measure loaders and training.")
    cluster = SubcommandApp()
    cluster.command(name="up")(Up)
    cluster.command(name="down")(Down)
    cluster.command(name="status")(Status)
    app.command(cluster, name="cluster", help="An autoscaling cluster on this machine alone, for trying things.")
    app.command(name="doctor")(Doctor)
    app.command(name="preview")(Preview)
    app.command(name="report")(Report)
    return app


if __name__ == "__main__":
    main()
