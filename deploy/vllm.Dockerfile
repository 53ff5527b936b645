# vLLM with kvweave's connector: the stock image and our package beside it, no file of vLLM changed.
#
#   docker build -f deploy/vllm.Dockerfile -t kvweave-vllm .
#
# The image brings its own torch, which satisfies what kvweave asks for and stays as it is.

FROM vllm/vllm-openai:v0.32.0
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir '/src[remote]' && rm -rf /src \
    && useradd --uid 10001 --create-home kvweave && install -d -o kvweave -g kvweave /data
ENV KVWEAVE_HOME=/data HF_HOME=/data/hub
VOLUME /data
USER kvweave
