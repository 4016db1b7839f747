#!/bin/bash
# One Ceph monitor, one object daemon in memory, and the S3 gateway, all on 127.0.0.1, for `make test-ceph`.
#
#   tests/ceph/up.sh DIRECTORY [PORT]     installs Debian's packages when needed, starts, prints the endpoint
#   tests/ceph/up.sh --down DIRECTORY     stops what DIRECTORY/run names and nothing else
#
# Needs root. Everything has a deadline: a starved gateway has been seen to hang.
set -euo pipefail

stop() {
    local file
    for file in "$1"/run/*.pid; do
        [ -e "$file" ] && kill "$(cat "$file")" 2>/dev/null || true
    done
}

if [ "${1:-}" = "--down" ]; then
    stop "$2"
    exit 0
fi

dir=$(mkdir -p "${1:?usage: up.sh DIRECTORY [PORT]}" && cd "$1" && pwd)
port=${2:-9104}
export CEPH_ACCESS_KEY=${CEPH_ACCESS_KEY:-test-access-key} CEPH_SECRET_KEY=${CEPH_SECRET_KEY:-test-secret-key}

if ! command -v radosgw >/dev/null || ! command -v ceph-osd >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends \
        ceph-mon ceph-osd radosgw ceph-common
fi

stop "$dir"
rm -rf "${dir:?}"/{mon,osd,rgw,run,log}
mkdir -p "$dir"/{mon,osd,rgw,run,log}
conf=$dir/ceph.conf
ring=$dir/admin.keyring
monitor="[v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$((port + 2))]"

cat >"$conf" <<EOF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = $monitor
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = $ring
run dir = $dir/run
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
log file = $dir/log/\$name.log
# One copy on one daemon is all there is.
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
# A daemon that waits for the processor is not dead.
osd heartbeat grace = 3600
osd objectstore = memstore
memstore device bytes = 6442450944
[mon.a]
mon data = $dir/mon
[osd.0]
osd data = $dir/osd
keyring = $dir/osd/keyring
[client.rgw.a]
rgw data = $dir/rgw
keyring = $dir/rgw/keyring
# Without the option, small answers wait 40 ms for the acknowledgement of their first packet.
rgw frontends = beast endpoint=127.0.0.1:$port tcp_nodelay=1
# What is deleted leaves the memory at once, not after two hours: benchmarks would fill it.
rgw gc obj min wait = 1
rgw gc processor period = 1
rgw gc processor max time = 60
EOF

{
    # The monitor, with a key for itself and one for the administrator.
    ceph-authtool --create-keyring "$dir/mon.keyring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool --create-keyring "$ring" --gen-key -n client.admin \
        --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    ceph-authtool "$dir/mon.keyring" --import-keyring "$ring"
    monmaptool --create --fsid "$(sed -n 's/^fsid = //p' "$conf")" --addv a "$monitor" "$dir/monmap"
    ceph-mon -c "$conf" -i a --mkfs --monmap "$dir/monmap" --keyring "$dir/mon.keyring"
    ceph-mon -c "$conf" -i a

    # The object daemon.
    osd_id=$(cat /proc/sys/kernel/random/uuid)
    timeout 30 ceph -c "$conf" osd new "$osd_id"
    timeout 30 ceph -c "$conf" auth get-or-create osd.0 \
        mon 'allow profile osd' osd 'allow *' mgr 'allow profile osd' -o "$dir/osd/keyring"
    ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$osd_id"
    ceph-osd -c "$conf" -i 0

    # The gateway and a user of it.
    timeout 30 ceph -c "$conf" auth get-or-create client.rgw.a \
        mon 'allow rw' osd 'allow rwx' mgr 'allow rw' -o "$dir/rgw/keyring"
    timeout 60 radosgw-admin -c "$conf" -n client.rgw.a user create --uid=test --display-name=test \
        --access-key="$CEPH_ACCESS_KEY" --secret-key="$CEPH_SECRET_KEY"
    timeout 60 radosgw -c "$conf" -n client.rgw.a
} >"$dir/log/up.log" 2>&1 || {
    echo "Ceph did not start; the end of $dir/log/up.log:" >&2
    tail -n 20 "$dir/log/up.log" >&2
    stop "$dir"
    exit 1
}

for _ in $(seq 60); do
    if timeout 2 bash -c "exec 3<>/dev/tcp/127.0.0.1/$port" 2>/dev/null; then
        echo "http://127.0.0.1:$port"
        exit 0
    fi
    sleep 0.5
done
echo "the gateway does not listen on port $port; see $dir/log" >&2
stop "$dir"
exit 1
