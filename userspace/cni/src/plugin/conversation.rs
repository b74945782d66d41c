//! Asking the agent, from a process without a runtime of its own.

use tokio::runtime;

use crate::client::{Absence, Client, Error};

/// Runs a request of the client to its end, on this thread.
pub(super) fn block_on<T>(
    client: &Client,
    request: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match runtime::Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime.block_on(request),
        // Out of file descriptors, say: nobody was asked.
        Err(error) => {
            Err(Error::Unreachable { path: client.socket().to_owned(), why: Absence::Other(error) })
        }
    }
}
