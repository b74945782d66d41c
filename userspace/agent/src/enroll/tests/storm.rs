//! Many pods at once.

use std::{sync::Arc, time::Duration};

use tokio::{task::JoinSet, time::Instant};

use crate::enroll::fakes::{Answer, Node, attachment};

const PODS: usize = 330;

#[tokio::test(start_paused = true)]
async fn of_330_adds_at_once_each_ends_and_those_that_failed_succeed_later() {
    let node = Arc::new(Node::new());
    {
        let mut answers = node.ztunnel.answers.lock().unwrap();
        for bad in [7, 107, 207] {
            answers.insert(format!("u{bad}"), Answer::Nack);
        }
        for bad in [8, 108, 208] {
            answers.insert(format!("u{bad}"), Answer::Silence);
        }
    }
    let failed = add_all(&node, 0..PODS).await;
    assert_eq!(failed, [7, 8, 107, 108, 207, 208]);
    assert_eq!(node.enrollment.dump().len(), PODS - failed.len());
    assert_eq!(node.dataplane.state().registered.len(), PODS - failed.len());
    assert_eq!(node.ztunnel.served.lock().unwrap().len(), PODS - failed.len());
    assert_eq!(node.records.read().unwrap().len(), PODS - failed.len());

    node.ztunnel.answers.lock().unwrap().clear();
    assert_eq!(add_all(&node, failed).await, Vec::<usize>::new());
    assert_eq!(node.enrollment.dump().len(), PODS);

    let mut removing = JoinSet::new();
    for number in 0..PODS {
        let node = Arc::clone(&node);
        removing.spawn(async move {
            node.enrollment.del(attachment("podnet", &format!("c{number}"), "eth0")).await;
        });
    }
    removing.join_all().await;
    node.assert_clean();
}

async fn add_all(node: &Arc<Node>, numbers: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut adding = JoinSet::new();
    for number in numbers {
        let node = Arc::clone(node);
        adding.spawn(async move {
            let add = node.request(&format!("u{number}"), &format!("c{number}"));
            let added = node.enrollment.add(add, Instant::now() + Duration::from_secs(19)).await;
            (number, added.is_err())
        });
    }
    let mut failed: Vec<_> =
        adding.join_all().await.into_iter().filter_map(|(number, failed)| failed.then_some(number)).collect();
    failed.sort_unstable();
    failed
}
