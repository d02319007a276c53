#!/usr/bin/env bash
# Build the image of a test node, and print its name: localhost/bedplate-node:<hash>.
#
#   build_image.sh           a plain node
#   build_image.sh driver    the same with DKMS, a compiler and the headers of a kernel: what a driver is built with.
#                            Its name is localhost/bedplate-node-driver:<hash>.
#
# A node is a whole Debian (or Ubuntu) with systemd and sshd, made from the packages of the release this machine runs,
# through the sources this machine's apt already uses. On top come stand-ins for a GPU driver (tests/fakegpu), in this
# image only. The hash covers everything that goes in, so an unchanged image is found, not built.
# Needs: podman, mmdebstrap, gcc, make. Changes nothing on this machine but podman's image store.
set -euo pipefail
export LC_ALL=C

readonly KIND=${1:-plain}
readonly ME=$(readlink -f "$0")
readonly HERE=${ME%/*}
readonly FAKEGPU=$HERE/../fakegpu

# What every GPU host has before anyone provisions it. Not libnuma1: a profile's system_packages must bring that.
PACKAGES=(
  systemd systemd-sysv dbus                    # the node boots, and reboots (through logind), like a machine
  openssh-server sudo acl                      # Ansible's way in; acl lets it become an unprivileged user
  python3 python3-apt python3-debian           # Ansible's modules, apt and deb822_repository among them
  ca-certificates gpg                          # apt and uv over https
  iproute2 kmod procps util-linux              # ip, modinfo, ps, flock
)

# One name for each kind, so that the images of one are never taken for old ones of the other.
case $KIND in
  plain) IMAGE=localhost/bedplate-node ;;
  driver) IMAGE=localhost/bedplate-node-driver ;;
  *) printf 'build_image.sh: unknown kind of node %s: plain or driver\n' "$KIND" >&2; exit 2 ;;
esac
readonly IMAGE

die() { printf 'build_image.sh: %s\n' "$*" >&2; exit 1; }

for tool in podman mmdebstrap gcc make; do
  command -v "$tool" >/dev/null || die "$tool is not installed: run 'make setup'"
done
# shellcheck source=/dev/null
. /etc/os-release
case ${ID:-} in
  debian) origin=Debian components='main|contrib|non-free|non-free-firmware' headers=linux-headers-amd64 ;;
  ubuntu) origin=Ubuntu components='main|restricted|universe|multiverse' headers=linux-headers-generic ;;
  *) die "this machine runs ${ID:-an unknown system}; node images are built on Debian or Ubuntu, from their own packages" ;;
esac

[ "$KIND" = plain ] || PACKAGES+=(dkms "$headers")

# One build at a time; the second one finds the first one's image. --close: nothing podman leaves running holds the lock.
if [ -z "${BEDPLATE_IMAGE_LOCKED:-}" ]; then
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/bedplate
  mkdir -p "$cache"
  BEDPLATE_IMAGE_LOCKED=yes exec flock --close "$cache" "$ME" "$KIND"
fi

# The distribution's own entries for this release, as apt itself reads them (deb822 or one-line, any file); others have
# another suite, component or origin. No mirror is named in this project.
sources() {
  apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI) $(ORIGIN)' 'Identifier: Packages' |
    awk -v suite="^$VERSION_CODENAME(-updates|-security)?\$" -v components="^($components)\$" -v origin="$origin" '
      # before the first `apt-get update` the origin is not known, and apt prints the name of the field
      $1 ~ suite && $2 ~ components && $3 ~ "^https?://" && ($4 == origin || $4 == "$(ORIGIN)") && !seen[$0]++ {
        print "deb", $3, $1, $2
      }'
}

# What makes apt work here beyond its sources: proxies, and whether dates are checked (a machine may live off an archive).
apt_options() {
  apt-config dump --format '%F "%v";%n' |
    grep -E '^Acquire::(https?::(Proxy|CAInfo)|Check-Valid-Until|Check-Date|Retries) ' || true
}

# Certificate authorities this machine trusts beyond the distribution's, as one PEM stream.
extra_authorities() {
  [ -s /etc/ssl/certs/ca-certificates.crt ] || return 0
  awk '
    /BEGIN CERTIFICATE/ { pem = "" }
    { pem = pem $0 "\n" }
    /END CERTIFICATE/ { if (packaged) known[pem] = 1; else if (!(pem in known)) { printf "%s", pem; known[pem] = 1 } }
  ' packaged=1 /usr/share/ca-certificates/*/*.crt packaged=0 /etc/ssl/certs/ca-certificates.crt
}

sources=$(sources)
[ -n "$sources" ] || die "apt has no source of $ID $VERSION_CODENAME over http(s) that is $ID's own"
apt_options=$(apt_options)
authorities=$(extra_authorities)
hash=$({ printf '%s\n' "$sources" "$apt_options" "$authorities"; uname -m; cat "$ME" "$FAKEGPU"/{nvml.c,cuda.c,Makefile}; } |
  sha256sum | cut -c1-12)
image=$IMAGE:$hash

# Older images of this name go; one that a container still uses goes after that, another time.
prune() {
  podman images --filter "reference=$IMAGE" --format '{{.Repository}}:{{.Tag}}' |
    while read -r old; do
      [ "$old" = "$image" ] || podman rmi "$old" >/dev/null 2>&1 || printf 'kept %s: in use\n' "$old" >&2
    done
}

if podman image exists "$image"; then
  prune
  printf '%s\n' "$image"
  exit
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/bedplate-node.XXXXXX")
trap 'rm -rf "$work"; ! podman image exists "$IMAGE:building" || podman rmi "$IMAGE:building" >/dev/null' EXIT
root=$work/root   # files laid over the packages

# put MODE PATH: a file of the image, from stdin
put() { mkdir -p "$root${2%/*}"; cat >"$root$2"; chmod "$1" "$root$2"; }

lib=/usr/lib/$(gcc -print-multiarch)
mkdir -p "$root$lib"
make --silent -C "$FAKEGPU" OUT="$work/lib"
install -m 0644 "$work"/lib/lib*.so.1 "$root$lib/"

put 0644 /etc/apt/apt.conf.d/90build-host <<<"$apt_options"
put 0440 /etc/sudoers.d/ops <<'SUDOERS'
ops ALL=(ALL:ALL) NOPASSWD: ALL
# sudo empties the environment; a login over SSH gets this file from PAM
Defaults env_file=/etc/environment
SUDOERS
put 0644 /etc/ssh/sshd_config.d/node.conf <<'SSHD'
PermitRootLogin no
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
# written by whoever creates the node
AuthorizedKeysFile /etc/ssh/authorized_keys.d/%u
SSHD
mkdir -p "$root/etc/ssh/authorized_keys.d"
# Every node makes its own host key at its first boot; only the type that known_hosts will hold.
put 0644 /etc/systemd/system/ssh-host-key.service <<'UNIT'
[Unit]
Description=Make this node's SSH host key
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key
Before=ssh.service ssh.socket

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -q -t ed25519 -N "" -C "" -f /etc/ssh/ssh_host_ed25519_key

[Install]
WantedBy=multi-user.target
UNIT
put 0644 /etc/environment </dev/null
if [ -n "$authorities" ]; then
  # update-ca-certificates wants one certificate per file
  mkdir -p "$root/usr/local/share/ca-certificates"
  awk -v out="$root/usr/local/share/ca-certificates/build-host-" \
    '/BEGIN CERTIFICATE/ { n++ } { print > (out n ".crt") }' <<<"$authorities"
  # uv and Python's requests carry a bundle of their own unless told to use the system's
  put 0644 /etc/environment <<'ENVIRONMENT'
SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
ENVIRONMENT
fi

cat >"$work/customize" <<'CUSTOMIZE'
#!/bin/sh
# $1 is the root of the new system
set -e
chroot "$1" useradd --create-home --shell /bin/bash ops
# No getty and no udev: a container has neither terminals nor devices of its own.
chroot "$1" systemctl --quiet enable ssh ssh-host-key
chroot "$1" systemctl --quiet mask getty.target console-getty.service systemd-udevd.service \
  systemd-udev-trigger.service systemd-networkd-wait-online.service \
  apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer
chroot "$1" ldconfig
log=$(chroot "$1" update-ca-certificates 2>&1) || { echo "$log" >&2; exit 1; }
# Each node is its own machine: keys and ids are made at its first boot.
rm -f "$1"/etc/ssh/ssh_host_*
: >"$1/etc/machine-id"
rm -f "$1/var/lib/dbus/machine-id"
CUSTOMIZE
chmod +x "$work/customize"

printf 'Building %s from %s %s packages (about a minute)\n' "$image" "$ID" "$VERSION_CODENAME" >&2
# Imported under a name of its own first: a build that breaks half way must not look like a finished image.
started=$SECONDS
apt_option_list=()
while read -r option; do
  [ -z "$option" ] || apt_option_list+=(--aptopt="$option")
done <<<"$apt_options"
# The package lists stay, as on any node in use: check mode can then say what would be installed.
printf '%s\n' "$sources" |
  mmdebstrap --quiet --variant=apt --skip=cleanup/apt/lists --include="$(IFS=,; echo "${PACKAGES[*]}")" \
    "${apt_option_list[@]}" --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook="tar -C '$root' --owner=0 --group=0 -cf - . | tar -C \"\$1\" --keep-directory-symlink -xf -" \
    --customize-hook="$work/customize" \
    "$VERSION_CODENAME" - - |
  podman import --quiet --change 'CMD ["/sbin/init"]' --change 'STOPSIGNAL SIGRTMIN+3' - "$IMAGE:building" >/dev/null
podman tag "$IMAGE:building" "$image"
podman untag "$IMAGE:building" "$IMAGE:building" # without the second argument every name goes

prune
printf 'Built in %d s\n' "$((SECONDS - started))" >&2
printf '%s\n' "$image"
