//! Events to stdout, off the threads that serve connections.

use std::{
    io::{self, BufWriter, Write as _},
    sync::{
        Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
};

use crate::event::Event;

/// The way to stdout.
#[derive(Debug)]
pub(super) struct Report {
    quiet: bool,
    events: Sender<Option<Event>>,
    writer: Mutex<Option<JoinHandle<io::Result<()>>>>,
}

impl Report {
    /// `quiet` leaves out what concerns a single connection.
    pub(super) fn start(quiet: bool) -> Self {
        let (events, queue) = mpsc::channel();
        Self { quiet, events, writer: Mutex::new(Some(thread::spawn(move || write(&queue)))) }
    }

    /// Whether events of connections are told.
    pub(super) fn tells_connections(&self) -> bool {
        !self.quiet
    }

    pub(super) fn tell(&self, event: Event) {
        // The writer is gone only when stdout is.
        self.events.send(Some(event)).ok();
    }

    /// Waits until everything is written. Later events are lost.
    pub(super) fn finish(&self) {
        self.events.send(None).ok();
        let writer = self.writer.lock().ok().and_then(|mut writer| writer.take());
        if let Some(Ok(Err(error))) = writer.map(JoinHandle::join) {
            tracing::warn!(%error, "events lost");
        }
    }
}

fn write(queue: &Receiver<Option<Event>>) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    while let Ok(Some(first)) = queue.recv() {
        let mut next = Some(first);
        while let Some(event) = next {
            serde_json::to_writer(&mut out, &event)?;
            out.write_all(b"\n")?;
            next = match queue.try_recv() {
                Ok(Some(event)) => Some(event),
                Ok(None) => return out.flush(),
                Err(_) => None,
            };
        }
        out.flush()?;
    }
    Ok(())
}
