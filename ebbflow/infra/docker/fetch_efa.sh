#!/bin/sh
# Fetch AWS's EFA installer into this folder and unpack it, if it is the publisher's.
#     sh fetch_efa.sh VERSION FINGERPRINT [SHA256] [URL]
# Any failed check ends this script, and with it the build of the image, before a line of the installer runs.
set -eu
version=$1
fingerprint=$2
sha256=${3:-}
url=${4:-https://efa-installer.amazonaws.com}
archive=aws-efa-installer-${version}.tar.gz

for file in aws-efa-installer.key "${archive}" "${archive}.sig"; do
    curl -fsSL -o "${file}" "${url}/${file}"
done
if [ -n "${sha256}" ]; then
    echo "${sha256}  ${archive}" | sha256sum -c -
fi
GNUPGHOME=$(mktemp -d)
export GNUPGHOME
gpg --batch --quiet --import aws-efa-installer.key
# gpg accepts the signature of any key that it has. Its status line ends with the fingerprint of the primary key.
gpg --batch --status-fd 1 --verify "${archive}.sig" "${archive}" > status || { cat status; exit 1; }
grep -q "^\[GNUPG:\] VALIDSIG .*${fingerprint}\$" status || {
    echo "${archive} is not signed by ${fingerprint}" >&2
    exit 1
}
rm -rf "${GNUPGHOME}"
tar xzf "${archive}"
