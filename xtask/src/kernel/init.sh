#!/bin/busybox sh
# First stage: the host's root file system, read-only, below a layer in memory.
set -e
trap 'echo "the guest cannot start"; /bin/busybox poweroff -f' EXIT
/bin/busybox --install -s /bin
mkdir -p /proc /host /layer /root
mount -t proc proc /proc

for module in /modules/*.ko; do insmod "$module"; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /host
mount -t tmpfs -o size=4g layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root

modules=$(cat /host-modules)
mkdir -p "/root/lib/modules/$(uname -r)" /root/dev
mount --bind "/host$modules" "/root/lib/modules/$(uname -r)"
mount -t devtmpfs dev /root/dev
mkdir -p /root/culvert-guest
cp /guest /command /root/culvert-guest
umount /proc

trap - EXIT
exec switch_root /root /bin/bash /culvert-guest/guest
