# A server of one model folder on an NVIDIA GPU, in the layout that Hugging Face Inference Endpoints expect:
#   docker build -t lantern .
#   docker run --restart on-failure --gpus all -p 8000:8000 -v /path/to/model:/repository:ro lantern
# Without a volume at /repository the embedded model is served: append `lantern-emoji --host 0.0.0.0`.
# g++ and Python's headers: Triton compiles the launchers of its kernels when they are first used.
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04

# Ubuntu removes old versions of its packages, so none are pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 lantern \
    && python3 -m venv /opt/lantern
ENV PATH=/opt/lantern/bin:$PATH
COPY . /tmp/lantern
RUN pip install --no-cache-dir "/tmp/lantern[serve]" && rm -rf /tmp/lantern

# a number, so that a host can see that it is not root
USER 1001
WORKDIR /home/lantern
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=10s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["lantern", "serve"]
CMD ["/repository", "--host", "0.0.0.0", "--port", "8000"]
