#!/usr/bin/env bash
# Build the image of every container and push it:
#     infra/docker/build.sh [IMAGE] [options of docker buildx build, such as --build-arg EFA_INSTALLER=1.37.0]
# IMAGE: repository and tag, by default METAFLOW_BATCH_CONTAINER_IMAGE (ebbflow.env). PUSH=no builds without pushing.
# Both bases are taken by the digest that their tags have now, and the digests become labels of the image.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -f requirements.txt ]; then cd ..; fi # by the path without links, this is the package's own folder

image="${METAFLOW_BATCH_CONTAINER_IMAGE:-}"
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  image="$1"
  shift
fi
if [ -z "$image" ]; then
  echo "no image: give its name, or set METAFLOW_BATCH_CONTAINER_IMAGE (. ./ebbflow.env)" >&2
  exit 2
fi
if ! docker buildx version > /dev/null 2>&1; then
  echo "docker buildx is not there; fix: install Docker with its buildx plugin" >&2
  exit 3
fi

arguments=(--platform linux/amd64 --provenance=false --file infra/docker/Dockerfile --tag "$image")
for name in CUDA_IMAGE PYTHON_IMAGE; do
  base="$(sed -n "s/^ARG $name=//p" infra/docker/Dockerfile)"
  digest="$(docker buildx imagetools inspect "$base" --format '{{.Manifest.Digest}}')"
  arguments+=(--build-arg "$name=$base@$digest" --label "ebbflow.$name=$base@$digest")
done

registry="${image%%/*}"
if [ "${PUSH:-yes}" = yes ]; then
  arguments+=(--push)
  case "$registry" in
    *.dkr.ecr.*.amazonaws.com*)
      region="${registry#*.dkr.ecr.}"
      aws ecr get-login-password --region "${region%%.*}" \
        | docker login --username AWS --password-stdin "$registry"
      ;;
  esac
else
  arguments+=(--load)
fi
docker buildx build "${arguments[@]}" "$@" .
