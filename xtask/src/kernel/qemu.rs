//! The emulated machine: its console goes to our output, its second serial line to a file.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::image::Image;
use crate::exec;

/// A guest that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(40 * 60);

/// This machine's files, as the guest's device `host`.
const ROOT: &str = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap";

/// Boots, shows the console, and returns the exit code that the guest wrote into `exit`.
pub(super) fn run(image: &Image, initramfs: &Path, exit: &Path) -> anyhow::Result<u8> {
    let start = Instant::now();
    let mut command = command(image, initramfs, exit);
    exec::echo(&command);
    let mut qemu =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start qemu")?;
    let in_time = show_console(&mut qemu);
    if !in_time {
        qemu.kill().context("cannot end qemu")?;
    }
    let status = qemu.wait().context("cannot wait for qemu")?;
    if !in_time {
        bail!("the guest ran longer than {} minutes and was ended", DEADLINE.as_secs() / 60);
    }
    let code = fs::read_to_string(exit).unwrap_or_default();
    let Ok(code) = code.trim().parse() else {
        bail!("the guest ended without an exit code (qemu: {status}): its last lines above say why");
    };
    eprintln!("kernel: {} ended with {code} after {:.0} s", image.release, start.elapsed().as_secs_f32());
    Ok(code)
}

fn command(image: &Image, initramfs: &Path, exit: &Path) -> Command {
    // qemu must not outlive xtask, whatever ends it.
    let mut command = Command::new("setpriv");
    command
        .args("--pdeathsig KILL qemu-system-x86_64".split(' '))
        .args("-nodefaults -display none -no-reboot -smp 2 -m 6G -cpu max".split(' '))
        // Not KVM: where it exists inside a virtual machine, guests have hung.
        .args("-accel tcg,thread=multi".split(' '))
        .args("-chardev stdio,id=console,signal=off -serial chardev:console".split(' '))
        .args(["-chardev", &format!("file,id=exit,path={}", exit.display()), "-serial", "chardev:exit"])
        .args(["-virtfs", ROOT, "-append", "console=ttyS0 quiet panic=-1", "-kernel"])
        .arg(image.kernel())
        .arg("-initrd")
        .arg(initramfs);
    command
}

/// Until the guest ends; false when the deadline comes first.
fn show_console(qemu: &mut Child) -> bool {
    let Some(console) = qemu.stdout.take() else {
        return true;
    };
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let lines = BufReader::new(console).split(b'\n').map_while(Result::ok);
        lines.map(|line| sender.send(line)).take_while(Result::is_ok).count()
    });
    let deadline = Instant::now() + DEADLINE;
    loop {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => println!("{}", String::from_utf8_lossy(&line).trim_end_matches('\r')),
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
    }
}
