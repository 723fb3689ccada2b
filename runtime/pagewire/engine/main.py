"""The engine process: `python -m pagewire.engine.main --config-fd N --report-fd M [--bind URL]`.

See `pagewire.child` for the two pipes. Exit codes: 0 after SIGTERM or SIGINT, 1 if the engine failed or could not start,
2 if the model or the configuration cannot be served.
"""

from __future__ import annotations

import argparse
import signal
import sys

import msgspec

from pagewire import log
from pagewire.child import Reporter, allow_many_files, explain_crashes, leave_with_parent, read_config
from pagewire.errors import ConfigError, ModelError
from pagewire.spinning import spin_briefly


def main(arguments: list[str] | None = None) -> int:
    """Run the engine until it is told to stop; its exit code."""
    parser = argparse.ArgumentParser(prog="pagewire.engine.main", description="The engine process of a server.")
    parser.add_argument("--config-fd", type=int, required=True, help="pipe with the configuration as JSON")
    parser.add_argument("--report-fd", type=int, required=True, help="pipe for reports to the parent")
    parser.add_argument("--bind", default="", help="where to listen, instead of what the configuration says")
    given = parser.parse_args(arguments)
    leave_with_parent(given.report_fd)
    explain_crashes()
    spin_briefly()
    # Until the loop takes signals over, they end the process at once: there is nothing to drain yet, and Python's own
    # handler would wait for the C code that loads weights.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    reporter = Reporter(given.report_fd)
    try:
        allow_many_files()
        config = read_config(given.config_fd)
        log.configure("engine", level=config.server.log_level)
        if given.bind:
            config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, bind=given.bind))
        reporter.loading("import")
        # Imported here and not above: this takes seconds and loads torch, and from the first moment on the process
        # must leave with its parent.
        from pagewire.engine.process import run  # noqa: PLC0415

        return run(config, reporter)
    except (ModelError, ConfigError, msgspec.DecodeError) as error:
        reporter.failed(error)
        return 2
    except Exception as error:
        reporter.failed(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
