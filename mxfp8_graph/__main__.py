"""`python -m mxfp8_graph` is `mxfp8-graph`."""

from mxfp8_graph.cli import main

if __name__ == "__main__":
    main()
