# The README's two commands in a container:
#   docker build -t mxfp8-graph .     runs make demo
#   docker run mxfp8-graph            runs make test
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
# PyTorch's builds for Linux on PyPI bring gigabytes of CUDA libraries, which a CPU has no use for.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /mxfp8-graph
COPY . .
RUN make demo
CMD ["make", "test"]
