//! Whether a pod that is enrolled is captured still.

use std::{sync::Arc, time::Duration};

use super::{Attachment, Enrollment, Failure, Redirect, Step, Ztunnel};

/// How long a probe of a CHECK may wait for its answer: the plugin waits one second for ours.
const CHECK_PROBE: Duration = Duration::from_millis(300);

/// What a look at an attachment found.
#[derive(Debug)]
pub enum Captured {
    /// No such attachment.
    Unknown,
    /// It is captured, or cannot be shown not to be.
    Yes,
    /// A connection of it was not captured.
    No(crate::self_test::Error),
}

impl<R: Redirect, Z: Ztunnel> Enrollment<R, Z> {
    /// Whether an attachment is captured, by another self-test.
    pub async fn check(self: &Arc<Self>, named: &Attachment) -> Captured {
        let sandboxes: Vec<_> =
            self.table().covered(named).map(|sandbox| Arc::new(sandbox.clone())).collect();
        if sandboxes.is_empty() {
            return Captured::Unknown;
        }
        for sandbox in sandboxes {
            let tested = self.blocking(Step::SelfTest, &sandbox, |this, sandbox| {
                Ok(this.redirect.self_test(&sandbox.netns, &sandbox.addresses(), CHECK_PROBE)?)
            });
            match tested.await {
                Err(Failure::SelfTest(error)) if error.is_no_capture() => {
                    sandbox.warn("a pod of the mesh is not captured", &error);
                    return Captured::No(error);
                }
                Err(error) => sandbox.warn("cannot tell whether a pod is captured", &error),
                Ok(()) => {}
            }
        }
        Captured::Yes
    }
}
