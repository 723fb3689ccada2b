"""The gateway process: `python -m pagewire.gateway.main --config-fd N --report-fd M --engine URL`.

See `pagewire.child` for the two pipes. Exit codes: 0 after SIGTERM, 1 if it failed, 2 if the model's text or the
configuration cannot be served.
"""

from __future__ import annotations

import argparse
import signal
import sys

import msgspec

from pagewire import log
from pagewire.child import Reporter, allow_many_files, explain_crashes, leave_with_parent, read_config
from pagewire.errors import ConfigError, ModelError, PagewireError


def main(arguments: list[str] | None = None) -> int:
    """Run the gateway until it is told to stop; its exit code."""
    parser = argparse.ArgumentParser(prog="pagewire.gateway.main", description="The gateway process of a server.")
    parser.add_argument("--config-fd", type=int, required=True, help="pipe with the configuration as JSON")
    parser.add_argument("--report-fd", type=int, required=True, help="pipe for reports to the parent")
    parser.add_argument("--engine", required=True, metavar="URL", help="where the engine listens, or will")
    parser.add_argument("--admin", default="", metavar="URL", help="where the server's owner may stop it")
    given = parser.parse_args(arguments)
    leave_with_parent(given.report_fd)
    explain_crashes()
    # Until the loop takes signals over there is nothing to drain: they end the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    reporter = Reporter(given.report_fd)
    try:
        allow_many_files()
        config = read_config(given.config_fd)
        log.configure("gateway", level=config.server.log_level)
        reporter.loading("import")
        # Imported here and not above: from the first moment on the process must leave with its parent.
        from pagewire.gateway.process import run  # noqa: PLC0415

        return run(config, given.engine, reporter, given.admin)
    except (ModelError, ConfigError, msgspec.DecodeError) as error:
        reporter.failed(error)
        return 2
    except PagewireError as error:
        reporter.failed(error)
        return 1
    except Exception as error:
        reporter.failed(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
