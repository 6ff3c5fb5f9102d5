"""`python -m mxfp8_graph` is `mxfp8-graph`."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C while it is imported ends the process without a traceback."""
    try:
        from mxfp8_graph.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
