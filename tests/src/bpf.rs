//! Maps of the kernel, read and written past the dataplane: bpf(2) without a library.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use crate::lab::Lab;

/// Commands (`enum bpf_cmd`, include/uapi/linux/bpf.h).
pub(crate) mod command {
    pub(crate) const MAP_CREATE: u32 = 0;
    pub(crate) const MAP_LOOKUP: u32 = 1;
    pub(crate) const MAP_UPDATE: u32 = 2;
    pub(crate) const MAP_NEXT_KEY: u32 = 4;
    pub(crate) const PROG_LOAD: u32 = 5;
    pub(crate) const OBJ_PIN: u32 = 6;
    pub(crate) const OBJ_GET: u32 = 7;
    pub(crate) const OBJ_INFO: u32 = 15;
    pub(crate) const LINK_CREATE: u32 = 28;
}

/// Issues a command with the part of `union bpf_attr` that it uses.
pub(crate) fn bpf<T>(command: u32, attributes: &mut T) -> io::Result<i32> {
    let size = size_of::<T>();
    // SAFETY: the kernel reads `size` bytes of `attributes`; pointers in it are the callers'.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// Issues a command that returns a descriptor.
pub(crate) fn open<T>(command: u32, attributes: &mut T) -> io::Result<OwnedFd> {
    let descriptor = bpf(command, attributes)?;
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct Object {
    pub(crate) path: u64,
    pub(crate) descriptor: i32,
    pub(crate) flags: u32,
}

#[repr(C)]
struct Info {
    descriptor: i32,
    length: u32,
    info: u64,
}

#[repr(C)]
struct Element {
    map: i32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// A map. Keys and values are plain `#[repr(C)]` types of the map's sizes.
#[derive(Debug)]
pub struct BpfMap {
    pub(crate) descriptor: OwnedFd,
}

impl BpfMap {
    /// The one that is pinned there.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let mut attributes = Object { path: path.as_ptr() as u64, ..Object::default() };
        Ok(Self { descriptor: open(command::OBJ_GET, &mut attributes)? })
    }

    /// Every key, as bytes.
    pub fn raw_keys(&self) -> Vec<Vec<u8>> {
        // The start of `struct bpf_map_info`: type, id, size of a key.
        let mut info = [0_u32; 3];
        let mut attributes = Info {
            descriptor: self.descriptor.as_raw_fd(),
            length: size_of_val(&info) as u32,
            info: info.as_mut_ptr() as u64,
        };
        bpf(command::OBJ_INFO, &mut attributes).expect("BPF_OBJ_GET_INFO_BY_FD");
        let mut keys = Vec::<Vec<u8>>::new();
        loop {
            let mut next = vec![0; info[2] as usize];
            let key = keys.last().map_or(0, |key| key.as_ptr() as u64);
            match self.element(command::MAP_NEXT_KEY, key, next.as_mut_ptr() as u64) {
                Ok(()) => keys.push(next),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return keys,
                Err(error) => panic!("keys of a map: {error}"),
            }
        }
    }

    /// Every key.
    pub fn keys<K: Copy>(&self) -> Vec<K> {
        let keys = self.raw_keys().into_iter().map(|key| {
            assert_eq!(key.len(), size_of::<K>(), "size of a key");
            // SAFETY: as many bytes as `K` has, and `K` is a plain type.
            unsafe { key.as_ptr().cast::<K>().read_unaligned() }
        });
        keys.collect()
    }

    /// The value of a key. Not for per-CPU maps.
    pub fn get<K, V: Copy>(&self, key: &K) -> Option<V> {
        let mut value = std::mem::MaybeUninit::<V>::uninit();
        let key = std::ptr::from_ref(key) as u64;
        self.element(command::MAP_LOOKUP, key, value.as_mut_ptr() as u64).ok()?;
        // SAFETY: the kernel has filled it in.
        Some(unsafe { value.assume_init() })
    }

    /// Writes.
    pub fn insert<K, V>(&self, key: &K, value: &V) -> io::Result<()> {
        self.element(command::MAP_UPDATE, std::ptr::from_ref(key) as u64, std::ptr::from_ref(value) as u64)
    }

    fn element(&self, command: u32, key: u64, value: u64) -> io::Result<()> {
        let mut attributes = Element { map: self.descriptor.as_raw_fd(), padding: 0, key, value, flags: 0 };
        bpf(command, &mut attributes).map(drop)
    }
}

impl Lab {
    /// A pinned map of the dataplane, by its name in `culvert_abi::names`.
    pub fn map(&self, name: &str) -> BpfMap {
        let path = self.config().bpffs.join("culvert/v1/maps").join(name);
        BpfMap::pinned(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}
