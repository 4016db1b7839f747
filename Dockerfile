# The command `ckpt` and the library, for jobs that look at checkpoints, copy, export or verify them:
#
#     docker build -t shardpoint .
#     docker run --rm -e AWS_PROFILE -v ~/.aws:/home/ckpt/.aws:ro shardpoint ls s3://bucket/run
#
# For a training, install the package into the image that has your torch: pip install '.[fast]'
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY storage storage
COPY ckpt ckpt
COPY sharding sharding
RUN python -m venv /opt/ckpt \
    && /opt/ckpt/bin/pip install --no-cache-dir -c constraints.txt '.[fast]'

FROM python:${PYTHON}-slim
COPY --from=build /opt/ckpt /opt/ckpt
ENV PATH=/opt/ckpt/bin:$PATH PYTHONUNBUFFERED=1
# By number: `runAsNonRoot` of Kubernetes takes no name.
RUN useradd --uid 1000 --create-home ckpt
USER 1000
WORKDIR /home/ckpt
ENTRYPOINT ["ckpt"]
CMD ["--help"]
