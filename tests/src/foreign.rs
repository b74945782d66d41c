//! BPF programs of somebody else: each counts how often it ran, and one rewrites addresses.

use std::{
    ffi::CString,
    io,
    net::Ipv4Addr,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use crate::{
    bpf::{BpfMap, Object, bpf, command, open},
    host::Host,
};

// include/uapi/linux/bpf.h: `enum bpf_prog_type`, `enum bpf_attach_type`.
const SCHED_CLS: u32 = 3;
const SOCK_OPS: u32 = 13;
const SOCK_ADDR: u32 = 18;
const SK_LOOKUP: u32 = 30;
const ATTACH_SOCK_OPS: u32 = 3;
const ATTACH_CONNECT4: u32 = 10;
const ATTACH_SK_LOOKUP: u32 = 36;
const ATTACH_TCX_INGRESS: u32 = 46;
const ATTACH_TCX_EGRESS: u32 = 47;
/// `TCX_NEXT`, `TC_ACT_UNSPEC`: whoever comes next decides.
const NEXT: i32 = -1;
/// Of a cgroup program: allowed. Of `sk_lookup`: SK_PASS, and no socket is chosen.
const PASS: i32 = 1;
/// Instructions that count.
const COUNT: usize = 4;

/// A direction through an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into the host.
    Ingress,
    /// Out of it.
    Egress,
}

/// A foreign program that runs until this is dropped.
#[derive(Debug)]
pub struct Foreign {
    runs: BpfMap,
    program: OwnedFd,
    link: Option<OwnedFd>,
}

impl Foreign {
    /// Whether the kernel has TCX.
    pub fn has_tcx() -> bool {
        let foreign = Self::count(SCHED_CLS, 0, NEXT).expect("a program of tc");
        // No interface has this number: ENODEV, but EINVAL where the kind of link is not known.
        let refused = foreign.attached(i32::MAX, ATTACH_TCX_INGRESS).expect_err("an interface");
        refused.raw_os_error() != Some(libc::EINVAL)
    }

    /// TCX on an interface (Linux 6.6).
    pub fn tcx(host: &Host, interface: &str, direction: Direction) -> io::Result<Self> {
        let index = host.interface_index(interface) as i32;
        let attach = match direction {
            Direction::Ingress => ATTACH_TCX_INGRESS,
            Direction::Egress => ATTACH_TCX_EGRESS,
        };
        let foreign = Self::count(SCHED_CLS, 0, NEXT)?;
        host.run(|| foreign.attached(index, attach))
    }

    /// A filter of tc, on a clsact qdisc that it adds if there is none.
    pub fn clsact(host: &Host, interface: &str, direction: Direction, bpffs: &Path) -> io::Result<Self> {
        let foreign = Self::count(SCHED_CLS, 0, NEXT)?;
        let pin = bpffs.join(format!("foreign-{}-{interface}-{direction:?}", host.name()));
        let path = CString::new(pin.as_os_str().as_bytes())?;
        let descriptor = foreign.program.as_raw_fd();
        let mut attributes = Object { path: path.as_ptr() as u64, descriptor, flags: 0 };
        bpf(command::OBJ_PIN, &mut attributes)?;
        host.command("tc").args(["qdisc", "add", "dev", interface, "clsact"]).output()?;
        let hook = format!("{direction:?}").to_lowercase();
        let filter = ["filter", "add", "dev", interface, &hook, "bpf", "direct-action", "object-pinned"];
        let output = host.command("tc").args(filter).arg(&pin).output()?;
        assert!(output.status.success(), "tc: {}", String::from_utf8_lossy(&output.stderr));
        Ok(foreign)
    }

    /// `sk_lookup` that selects no socket.
    pub fn sk_lookup(host: &Host) -> io::Result<Self> {
        let foreign = Self::count(SK_LOOKUP, ATTACH_SK_LOOKUP, PASS)?;
        foreign.attached(host.netns().as_fd().as_raw_fd(), ATTACH_SK_LOOKUP)
    }

    /// `connect4` that allows.
    pub fn connect4(cgroup: &impl AsFd) -> io::Result<Self> {
        Self::count(SOCK_ADDR, ATTACH_CONNECT4, PASS)?.attached(cgroup.as_fd().as_raw_fd(), ATTACH_CONNECT4)
    }

    /// `sock_ops`.
    pub fn sock_ops(cgroup: &impl AsFd) -> io::Result<Self> {
        Self::count(SOCK_OPS, ATTACH_SOCK_OPS, PASS)?.attached(cgroup.as_fd().as_raw_fd(), ATTACH_SOCK_OPS)
    }

    /// `connect4` as Cilium's socket load balancer: who connects to `from` reaches `to`. Counts those.
    pub fn balancer(cgroup: &impl AsFd, from: Ipv4Addr, to: Ipv4Addr) -> io::Result<Self> {
        let (from, to) = (i32::from_ne_bytes(from.octets()), i32::from_ne_bytes(to.octets()));
        // Offset of `user_ip4` in `struct bpf_sock_addr`.
        const USER_IP4: i16 = 4;
        let is_another = 2 + COUNT as i16;
        let rewrite = [
            instruction(0xbf, 6, 1, 0, 0),          // r6 = r1
            instruction(0x61, 2, 6, USER_IP4, 0),   // r2 = *(u32 *)(r6 + 4)
            instruction(0xb4, 3, 0, 0, from),       // w3 = from
            instruction(0x5d, 2, 3, is_another, 0), // if r2 != r3 goto "r0 = PASS"
            instruction(0xb4, 3, 0, 0, to),         // w3 = to
            instruction(0x63, 6, 3, USER_IP4, 0),   // *(u32 *)(r6 + 4) = r3
        ];
        let foreign = Self::load(SOCK_ADDR, ATTACH_CONNECT4, &rewrite, PASS)?;
        foreign.attached(cgroup.as_fd().as_raw_fd(), ATTACH_CONNECT4)
    }

    /// How often it ran.
    pub fn runs(&self) -> u64 {
        self.runs.get(&0_u32).expect("the only element of an array")
    }

    fn count(kind: u32, attach: u32, result: i32) -> io::Result<Self> {
        Self::load(kind, attach, &[], result)
    }

    /// `first`, then add 1 to the counter, then return `result`.
    fn load(kind: u32, attach: u32, first: &[u64], result: i32) -> io::Result<Self> {
        // BPF_MAP_TYPE_ARRAY, sizes of key and value, entries, flags.
        let mut array = [2_u32, 4, 8, 1, 0];
        let runs = BpfMap { descriptor: open(command::MAP_CREATE, &mut array)? };
        let count: [u64; COUNT] = [
            // r1 = address of the array's value (BPF_PSEUDO_MAP_VALUE), two instructions long.
            instruction(0x18, 1, 2, 0, runs.descriptor.as_raw_fd()),
            0,
            instruction(0xb7, 2, 0, 0, 1), // r2 = 1
            instruction(0xdb, 1, 2, 0, 0), // lock *(u64 *)(r1 + 0) += r2
        ];
        let end = [instruction(0xb7, 0, 0, 0, result), instruction(0x95, 0, 0, 0, 0)];
        let instructions = [first, &count, &end].concat();
        let mut log = vec![0_u8; 16 << 10];
        let mut attributes = Load {
            kind,
            count: instructions.len() as u32,
            instructions: instructions.as_ptr() as u64,
            license: c"GPL".as_ptr() as u64,
            log_level: 1,
            log_size: log.len() as u32,
            log: log.as_mut_ptr() as u64,
            name: *b"foreign\0\0\0\0\0\0\0\0\0",
            attach,
            ..Load::default()
        };
        let program = open(command::PROG_LOAD, &mut attributes);
        let program = program.map_err(|error| {
            let log = String::from_utf8_lossy(&log);
            io::Error::new(error.kind(), format!("{error}: {}", log.trim_end_matches('\0')))
        })?;
        Ok(Self { runs, program, link: None })
    }

    fn attached(mut self, target: i32, attach: u32) -> io::Result<Self> {
        // Program, target, attach type, flags; what is particular to a kind stays zero.
        let mut attributes = [0_u32; 12];
        attributes[..3].copy_from_slice(&[self.program.as_raw_fd() as u32, target as u32, attach]);
        self.link = Some(open(command::LINK_CREATE, &mut attributes)?);
        Ok(self)
    }
}

/// `struct bpf_insn`.
fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> u64 {
    let [low, high] = offset.to_le_bytes();
    let [a, b, c, d] = immediate.to_le_bytes();
    u64::from_le_bytes([code, from << 4 | to, low, high, a, b, c, d])
}

/// The part of `union bpf_attr` for BPF_PROG_LOAD.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach: u32,
}
