# kvweave serve in a container, as an ordinary user.
#
#   docker build -t kvweave .
#   docker run -p 8321:8321 -v kvweave:/data kvweave
#
# /data keeps models, knowledge bases and chunk KV. `docker build --build-arg PIP_INDEX_URL=…` takes
# packages from another index, such as one with CPU builds of torch. What is served to a network
# wants keys: -e KVWEAVE_API_KEYS=… when it is run, never in the image.

FROM python:3.12.11-slim-bookworm AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/kvweave/bin:$PATH
WORKDIR /src
# Layers that change ever more often: torch, the other packages, our own code. torch is whichever build the
# index has and so without a hash; all others are taken anew, no file whose hash is not in requirements.lock.
COPY constraints.txt ./
RUN python -m venv /opt/kvweave && pip install -c constraints.txt torch numpy
COPY requirements.lock ./
RUN pip install --force-reinstall --no-deps --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-deps . && pip check

FROM python:3.12.11-slim-bookworm
# a C compiler: products are compiled for the CPU that runs them (docs/cpu.md)
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home kvweave && install -d -o kvweave -g kvweave /data
COPY --from=build /opt/kvweave /opt/kvweave
ENV PATH=/opt/kvweave/bin:$PATH KVWEAVE_HOME=/data KVWEAVE_SERVER_HOST=0.0.0.0
VOLUME /data
USER kvweave
WORKDIR /home/kvweave
EXPOSE 8321
# alive is enough: the first start fetches the model, and /readyz is for those who send requests
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8321/healthz', timeout=4)"]
ENTRYPOINT ["kvweave"]
CMD ["serve"]
