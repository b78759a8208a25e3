# syntax=docker/dockerfile:1
# mrl for a CPU (docker build --target cpu -t mrl:cpu .) or for NVIDIA GPUs (docker build --target cuda -t mrl:cuda .).
#   docker run --rm -it --init -v "$PWD:/work" mrl:cpu quickstart
#   docker run --rm -it --init --gpus all --shm-size 8g -v "$PWD:/work" -v mrl-cache:/cache mrl:cuda train my.toml
# Runs land in /work; made policies and engine environments in /cache. The user is 1000:1000.
# Environments of vLLM and SGLang are not in the image: `mrl engine-env vllm` makes them once in /cache.

FROM python:3.11-slim-bookworm AS source
# A package of the tasks (pycosat) has no wheel, so a compiler is needed to install it.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/mrl
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs ./configs
COPY mrl ./mrl

# torch's build for CPUs spares gigabytes; only PyTorch's own index has it. That index is asked for torch alone: as a
# second index beside PyPI it could supply any package.
FROM source AS installed-cpu
RUN /opt/mrl/bin/pip install --no-cache-dir --no-input -c constraints.txt --no-deps \
    --index-url https://download.pytorch.org/whl/cpu torch
RUN /opt/mrl/bin/pip install --no-cache-dir --no-input -c constraints.txt ".[tasks,lora,plots]"

# PyPI's build of torch for Linux brings CUDA's libraries; the driver comes from the host (580 or newer for CUDA 13).
FROM source AS installed-cuda
RUN /opt/mrl/bin/pip install --no-cache-dir --no-input -c constraints.txt ".[tasks,lora,plots]"

FROM python:3.11-slim-bookworm AS cpu
RUN useradd --uid 1000 --create-home mrl && mkdir /work /cache && chown mrl:mrl /work /cache
COPY --from=installed-cpu /opt/mrl /opt/mrl
# Nothing in it is secret: TOKENIZERS_PARALLELISM only sounds so.
# hadolint ignore=DL3064
ENV PATH=/opt/mrl/bin:$PATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false \
    MRL_CACHE=/cache/policies MRL_ENGINE_HOME=/cache/engines
USER 1000:1000
WORKDIR /work
VOLUME ["/work", "/cache"]
ENTRYPOINT ["mrl"]
CMD ["doctor"]

FROM python:3.11-slim-bookworm AS cuda
# triton and torch.compile call a compiler at run time.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home mrl && mkdir /work /cache && chown mrl:mrl /work /cache
COPY --from=installed-cuda /opt/mrl /opt/mrl
# Nothing in it is secret: TOKENIZERS_PARALLELISM only sounds so.
# hadolint ignore=DL3064
ENV PATH=/opt/mrl/bin:$PATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false \
    MRL_CACHE=/cache/policies MRL_ENGINE_HOME=/cache/engines \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /work
VOLUME ["/work", "/cache"]
ENTRYPOINT ["mrl"]
CMD ["doctor"]
