//! Takes pods out of the mesh whose description changed.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Decision, Membership, Named, Redirection};
use crate::enroll::{Enrollment, Redirect, Ztunnel};

/// Decides over every enrolled pod again whenever decisions may have changed, until membership ends. Only a
/// decision takes a pod out: one that nothing is known of any more stays captured (`lifecycle.md` §6).
pub async fn follow<R: Redirect, Z: Ztunnel, M: Membership>(
    membership: Arc<M>,
    enrollment: Arc<Enrollment<R, Z>>,
) {
    let mut changes = membership.changes();
    // Records may name pods that have left while no agent ran.
    changes.mark_changed();
    while changes.changed().await.is_ok() {
        for (uid, pod) in enrollment.pods() {
            let named =
                Named { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: Some(uid.clone()) };
            if let Ok(Decision::Outside) = membership.decide(&named, Instant::now()).await {
                enrollment.withdraw(&uid).await;
                membership.announce(&pod, Redirection::Absent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Mutex, time::Duration};

    use tokio::{sync::watch, time::timeout};

    use super::*;
    use crate::{
        enroll::{Pod, fakes::Node},
        membership::Undecided,
    };

    const LONG: Duration = Duration::from_secs(20);

    struct Described {
        outside: Mutex<BTreeSet<String>>,
        unknown: BTreeSet<String>,
        changes: watch::Sender<u64>,
        announced: Mutex<Vec<(String, Redirection)>>,
    }

    impl Membership for Described {
        async fn decide(&self, pod: &Named, _deadline: Instant) -> Result<Decision, Undecided> {
            let Named { namespace, name, uid } = pod.clone();
            let uid = uid.unwrap_or_default();
            if self.unknown.contains(&uid) {
                return Err(Undecided::Unknown { namespace, name });
            }
            if self.outside.lock().unwrap().contains(&uid) {
                return Ok(Decision::Outside);
            }
            let pod = Pod { uid, namespace, name, service_account: "web".into() };
            Ok(Decision::Member { pod, bypass_inbound: false })
        }

        fn changes(&self) -> watch::Receiver<u64> {
            self.changes.subscribe()
        }

        fn announce(&self, pod: &Pod, redirection: Redirection) {
            self.announced.lock().unwrap().push((pod.uid.clone(), redirection));
        }
    }

    #[tokio::test]
    async fn only_a_pod_that_is_known_to_be_outside_leaves() {
        let node = Node::new();
        for uid in ["stays", "leaves", "unknown"] {
            node.add(uid, uid).await.unwrap();
        }
        let membership = Arc::new(Described {
            outside: Mutex::default(),
            unknown: ["unknown".to_owned()].into(),
            changes: watch::Sender::new(0),
            announced: Mutex::default(),
        });
        tokio::spawn(follow(Arc::clone(&membership), Arc::clone(&node.enrollment)));
        membership.outside.lock().unwrap().insert("leaves".into());
        membership.changes.send_modify(|change| *change += 1);
        let told = async {
            while membership.announced.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, told).await.unwrap();
        assert_eq!(*membership.announced.lock().unwrap(), [("leaves".to_owned(), Redirection::Absent)]);
        node.assert_enrolled("stays", "stays");
        node.assert_enrolled("unknown", "unknown");
        assert_eq!(node.enrollment.dump().len(), 2);
    }
}
