//! A network namespace, by an open file descriptor.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
    process, thread,
};

use nix::sched::{CloneFlags, unshare};

use crate::Error;

/// An open network namespace. Holding it keeps the namespace alive.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    cookie: u64,
}

impl Netns {
    /// Opens the namespace at a path (`/var/run/netns/…`, `/proc/<pid>/ns/net`).
    ///
    /// # Errors
    /// When the path cannot be opened or is no network namespace.
    pub fn open(path: &Path) -> Result<Self, Error> {
        // A fifo would be waited for.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(Error::path("open netns", path))?;
        Self::from_fd(file.into()).map_err(|error| match error {
            Error::System { source, .. } => Error::Path { action: "enter netns", path: path.into(), source },
            other => other,
        })
    }

    /// Takes over an open namespace.
    ///
    /// # Errors
    /// When the descriptor is no network namespace.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, Error> {
        let cookie = inside(fd.as_fd(), netns_cookie).map_err(Error::system("setns"))?;
        let cookie = cookie.map_err(Error::system("SO_NETNS_COOKIE"))?;
        Ok(Self { fd, cookie })
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    pub fn current() -> Result<Self, Error> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// A new, empty namespace in which only `lo` is up.
    ///
    /// # Errors
    /// When the process lacks CAP_SYS_ADMIN.
    pub fn create() -> Result<Self, Error> {
        let made = thread::scope(|scope| {
            let thread = scope.spawn(|| -> io::Result<(OwnedFd, u64)> {
                unshare(CloneFlags::CLONE_NEWNET)?;
                crate::routing::raise_loopback()?;
                let file = File::open("/proc/thread-self/ns/net")?;
                Ok((file.into(), netns_cookie()?))
            });
            thread.join().unwrap_or_else(|_panic| Err(io::Error::other("the thread that makes it panicked")))
        });
        let (fd, cookie) = made.map_err(Error::system("unshare(CLONE_NEWNET)"))?;
        Ok(Self { fd, cookie })
    }

    /// The kernel's identity of the namespace (`SO_NETNS_COOKIE`, Linux 5.14): never reused during one
    /// boot, unlike inode numbers.
    pub const fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Runs `work` inside the namespace, on the calling thread. Sockets opened there stay in it, and so
    /// would threads and processes that are started there.
    ///
    /// # Errors
    /// When the namespace cannot be entered (CAP_SYS_ADMIN is missing).
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T, Error> {
        inside(self.fd.as_fd(), work).map_err(Error::system("setns"))
    }

    /// A second handle.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn try_clone(&self) -> Result<Self, Error> {
        let fd = self.fd.try_clone().map_err(Error::system("dup"))?;
        Ok(Self { fd, cookie: self.cookie })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// In and out again on the calling thread: 2 us, where a thread for it takes 60. ztunnel does the same
/// (`src/inpod/netns.rs`).
fn inside<T>(netns: BorrowedFd<'_>, work: impl FnOnce() -> T) -> io::Result<T> {
    let home = File::open("/proc/thread-self/ns/net")?;
    enter(netns)?;
    let _back = Back(home);
    Ok(work())
}

/// Brings the thread back, also when the work panics.
struct Back(File);

impl Drop for Back {
    fn drop(&mut self) {
        if let Err(error) = enter(self.0.as_fd()) {
            // What this thread did next would be done to a pod. Enrolled pods stay as they are.
            tracing::error!(%error, "a thread cannot leave a pod's netns; ending this process");
            process::abort();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that enters a netns, and leaves it again")]
fn enter(netns: BorrowedFd<'_>) -> io::Result<()> {
    Ok(nix::sched::setns(netns, CloneFlags::CLONE_NEWNET)?)
}

/// The cookie of the calling thread's namespace, in host order.
fn netns_cookie() -> io::Result<u64> {
    // SAFETY: plain numbers; the result is checked.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    let value = (&raw mut cookie).cast();
    // SAFETY: value and length describe `cookie`, which outlives the call.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &raw mut length)
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// include/uapi/asm-generic/socket.h, Linux 5.14; no crate has it.
const SO_NETNS_COOKIE: libc::c_int = 71;
