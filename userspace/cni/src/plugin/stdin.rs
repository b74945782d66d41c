//! Stdin in bounded time and memory.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd,
};

use crate::{answer::Refusal, codes::Code};

/// How long a runtime may take to write the configuration. It writes before it waits.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Longest configuration.
const LIMIT: usize = 1 << 20;
const CHUNK: usize = 16 << 10;

/// Everything until the end of the file.
pub(super) fn read(file: impl AsFd, deadline: Instant) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        wait(&file, deadline)?;
        match unistd::read(&file, &mut chunk) {
            Ok(0) => return Ok(bytes),
            Ok(length) => bytes.extend_from_slice(chunk.get(..length).unwrap_or_default()),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(errno) => return Err(failed(format!("cannot read stdin: {}", errno.desc()))),
        }
        if bytes.len() > LIMIT {
            return Err(Refusal::new(
                Code::Undecodable,
                "the network configuration is too long",
                format!("stdin has more than {LIMIT} bytes"),
            ));
        }
    }
}

fn wait(file: &impl AsFd, deadline: Instant) -> Result<(), Refusal> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return Err(failed(format!("stdin did not end within {PATIENCE:?}"))),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(failed(format!("cannot wait for stdin: {}", errno.desc()))),
        }
    }
}

fn failed(why: String) -> Refusal {
    Refusal::new(Code::Io, "the network configuration cannot be read", why)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io};

    use super::*;

    #[test]
    fn a_pipe_is_read_to_its_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        io::Write::write_all(&mut writer, b"{}").unwrap();
        drop(writer);
        assert_eq!(read(reader, Instant::now() + PATIENCE).unwrap(), b"{}");
    }

    #[test]
    fn a_writer_that_never_ends_is_left() {
        let (reader, _writer) = io::pipe().unwrap();
        let error = read(reader, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.code, Code::Io);
    }

    #[test]
    fn an_endless_file_is_left() {
        let error = read(File::open("/dev/zero").unwrap(), Instant::now() + PATIENCE).unwrap_err();
        assert_eq!(error.code, Code::Undecodable);
    }

    #[test]
    fn a_directory_cannot_be_read() {
        let error = read(File::open("/").unwrap(), Instant::now() + PATIENCE).unwrap_err();
        assert_eq!(error.code, Code::Io);
    }
}
