# docker build -t trimtab . && docker run --rm --user "$(id -u)" -v "$PWD:/work" trimtab analyze rollout.parquet --ranks 16
# Everything but training; --build-arg EXTRAS='[train]' adds it.

# For development; see .devcontainer.
FROM python:3.11-slim-bookworm AS dev
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends chromium g++ git make procps \
    && rm -rf /var/lib/apt/lists/*

FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt hatchling \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG EXTRAS=
COPY constraints.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)$EXTRAS" \
    && useradd --create-home trimtab
# Of any user that docker run names.
ENV NUMBA_CACHE_DIR=/tmp/kernels
USER 1000
WORKDIR /work
ENTRYPOINT ["trimtab"]
