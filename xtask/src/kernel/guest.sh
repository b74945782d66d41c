# Second stage, process 1 of the guest: the usual mounts, the command, its exit code, power off.
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
# Not /tmp: the clone may be there, and the layer in memory takes the writes.
mount -t tmpfs run /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
hostname guest
ip link set lo up

# The second serial line carries nothing but the exit code.
stty -F /dev/ttyS1 raw -echo
bash /culvert-guest/command </dev/null 2>&1 | cat
echo "${PIPESTATUS[0]}" > /dev/ttyS1
sync
busybox poweroff -f
