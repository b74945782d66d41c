//! A process of the lab's: in a netns, heard line by line, gone when the lab is.

use std::{
    env,
    io::{BufRead as _, BufReader},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::PathBuf,
    process::{ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::{
    sys::{
        prctl,
        signal::{Signal, kill},
    },
    unistd::Pid,
};

use crate::{
    host::Host,
    journal::{DEADLINE, Journal},
};

/// A running process, or one that was. Clones are the same process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    exited: Journal<ExitStatus>,
}

impl Process {
    /// Starts `command` inside `host` and hands every line of its output to `hear`.
    ///
    /// A thread makes the process, listens, and lives as long: the kernel kills a child when the thread
    /// that made it ends, and the lab's end is the end of all threads.
    pub(crate) fn start(
        host: &Host,
        mut command: Command,
        mut hear: impl FnMut(String) + Send + 'static,
    ) -> (Self, ChildStdin) {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: prctl(2) alone may be called between fork and exec.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let (started, child) = mpsc::channel();
        let exited = Journal::default();
        thread::spawn({
            let (host, exited) = (host.clone(), exited.clone());
            move || {
                host.run(|| {
                    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
                    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
                    let (stdin, stdout) = stdin.zip(stdout).expect("pipes");
                    started.send((child.id(), stdin)).expect("the lab waits");
                    BufReader::new(stdout).lines().map_while(Result::ok).for_each(&mut hear);
                    exited.push(child.wait().unwrap_or_else(|_lost| ExitStatus::from_raw(0)));
                });
            }
        });
        let (pid, stdin) = child.recv_timeout(DEADLINE).expect("the process must start");
        (Self { pid: Pid::from_raw(pid as i32), exited }, stdin)
    }

    /// How it ended, if it has.
    pub(crate) fn status(&self) -> Option<ExitStatus> {
        self.exited.all().last().copied()
    }

    /// Waits for its end.
    pub(crate) fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        self.exited.wait_within(limit, |exited| exited.last().copied())
    }

    /// Nothing if it has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        if self.status().is_none() {
            kill(self.pid, signal).expect("kill(2)");
        }
    }

    /// SIGKILL, and waits.
    pub(crate) fn kill(&self) {
        self.signal(Signal::SIGKILL);
        self.wait(DEADLINE);
    }
}

/// A program built along with the running one.
pub(crate) fn program(name: &str) -> PathBuf {
    let running = env::current_exe().expect("path of this program");
    let mut candidates = running.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    candidates.find(|path| path.exists()).unwrap_or_else(|| {
        panic!(
            "no {name} beside {}: run `cargo build -p culvert-tests -p culvert-agent -p culvert-cni --bins`",
            running.display()
        )
    })
}
