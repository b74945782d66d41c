//! The `bpf(2)` commands that aya has no way to issue, or not for every type of program.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use culvert_abi::ListenerKey;

const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_LINK_DETACH: libc::c_long = 34;

/// Issues a command. `attributes` is the part of `union bpf_attr` that the command uses.
fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<libc::c_long> {
    let size = size_of::<T>();
    // SAFETY: the kernel reads and writes `size` bytes of `attributes`; pointers in it are the callers'.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// What BPF_OBJ_PIN and BPF_OBJ_GET use.
#[repr(C)]
struct Pinned {
    path: u64,
    descriptor: i32,
    flags: u32,
}

/// Opens a pinned link (BPF_OBJ_GET).
pub(crate) fn open_link(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attributes = Pinned { path: path.as_ptr() as u64, descriptor: 0, flags: 0 };
    descriptor(bpf(BPF_OBJ_GET, &mut attributes)?)
}

/// Pins a link (BPF_OBJ_PIN).
pub(crate) fn pin(link: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attributes = Pinned { path: path.as_ptr() as u64, descriptor: link.as_raw_fd(), flags: 0 };
    bpf(BPF_OBJ_PIN, &mut attributes).map(drop)
}

/// Attaches a program to a cgroup by a new link, beside those of others (BPF_LINK_CREATE, Linux 5.7): a link is
/// always "multi". aya 0.14 gives no access to the link of a `setsockopt` program.
pub(crate) fn attach_to_cgroup(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    hook: u32,
) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        program: i32,
        target: i32,
        hook: u32,
        flags: u32,
    }
    let (program, target) = (program.as_raw_fd(), cgroup.as_raw_fd());
    descriptor(bpf(BPF_LINK_CREATE, &mut Attributes { program, target, hook, flags: 0 })?)
}

fn descriptor(result: libc::c_long) -> io::Result<OwnedFd> {
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result as libc::c_int) })
}

/// Replaces the program of a live link, atomically (BPF_LINK_UPDATE, Linux 5.7). aya 0.14 offers it
/// only for tc and xdp.
pub(crate) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Attributes {
        link: i32,
        program: i32,
        flags: u32,
        old_program: u32,
    }
    let mut attributes =
        Attributes { link: link.as_raw_fd(), program: program.as_raw_fd(), flags: 0, old_program: 0 };
    bpf(BPF_LINK_UPDATE, &mut attributes).map(drop)
}

/// Ends what a link does, at once, whoever still holds it (BPF_LINK_DETACH, Linux 5.9). One whose netns is
/// gone has ended already.
pub(crate) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut descriptor = link.as_raw_fd();
    bpf(BPF_LINK_DETACH, &mut descriptor).map(drop)
}

/// Inode of the netns a link is attached to; 0 when it is gone and the link does nothing any more.
pub(crate) fn netns_inode(link: BorrowedFd<'_>) -> io::Result<u32> {
    link_info(link).map(|info| info.target[0])
}

/// Id of the program that a link runs.
pub(crate) fn program_id(link: BorrowedFd<'_>) -> io::Result<u32> {
    link_info(link).map(|info| info.program)
}

/// Id of the cgroup a link is attached to: the inode number of its directory.
pub(crate) fn cgroup_id(link: BorrowedFd<'_>) -> io::Result<u64> {
    let [a, b] = link_info(link)?.target.map(u32::to_ne_bytes);
    Ok(u64::from_ne_bytes([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]))
}

/// The start of `struct bpf_link_info` (include/uapi/linux/bpf.h): `target` is `netns.netns_ino` or
/// the two halves of `cgroup.cgroup_id`.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    target: [u32; 2],
}

fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    #[repr(C)]
    struct Attributes {
        descriptor: i32,
        length: u32,
        info: u64,
    }
    let mut info = LinkInfo::default();
    let length = size_of::<LinkInfo>() as u32;
    let mut attributes = Attributes { descriptor: link.as_raw_fd(), length, info: (&raw mut info) as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attributes)?;
    Ok(info)
}

/// The cookie of a stored socket (SO_COOKIE). aya's `SockHash` cannot be read from user space.
pub(crate) fn listener_cookie(map: BorrowedFd<'_>, key: &ListenerKey) -> io::Result<Option<u64>> {
    #[repr(C)]
    struct Attributes {
        map: i32,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut cookie = 0_u64;
    let mut attributes = Attributes {
        map: map.as_raw_fd(),
        padding: 0,
        key: std::ptr::from_ref(key) as u64,
        value: (&raw mut cookie) as u64,
        flags: 0,
    };
    match bpf(BPF_MAP_LOOKUP_ELEM, &mut attributes) {
        Ok(_) => Ok(Some(cookie)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}
