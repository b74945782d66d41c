//! A node starts all its pods at once.

use culvert_tests::{Behaviour, Ended, Lab, Pod};

/// Three times what kubelet allows on a node, as after a reboot.
const PODS: usize = 330;
/// One in a hundred each: refused, and never answered.
const REFUSED: [usize; 3] = [17, 133, 301];
const IGNORED: [usize; 3] = [51, 200, 282];

fn uid(number: &usize) -> String {
    format!("uid-of-p{number}")
}

#[test]
fn three_hundred_and_thirty_adds_at_once_each_end_and_the_failed_ones_leave_nothing() {
    let lab = Lab::bare();
    // Each silence holds up everybody for ztunnel's ack timeout.
    let agent = lab.node_agent().patience(60).start();
    let ill = lab.start_stand_in(Behaviour {
        nack: REFUSED.iter().map(|number| (uid(number), "not this one".to_owned())).collect(),
        ignore: IGNORED.iter().map(uid).collect(),
        ..Behaviour::default()
    });
    let pods: Vec<_> = (0..PODS).map(|number| lab.pod(&format!("p{number}"))).collect();
    let before: Vec<_> = REFUSED.iter().chain(&IGNORED).map(|number| pods[*number].footprint()).collect();
    let idle = agent.descriptors().len();

    let adds: Vec<_> = pods.iter().map(|pod| agent.runtime(pod).begin("ADD")).collect();
    let ended: Vec<Ended> = adds.into_iter().map(|add| add.end()).collect();
    for (number, ended) in ended.iter().enumerate() {
        if REFUSED.contains(&number) {
            ended.fails(102, "ztunnel on connection … refused: …");
        } else if IGNORED.contains(&number) {
            ended.fails(104, "ztunnel on connection … did not answer in time");
        } else {
            ended.succeeds();
        }
    }
    let failed: Vec<&Pod> = REFUSED.iter().chain(&IGNORED).map(|number| &pods[*number]).collect();
    for (pod, before) in failed.iter().zip(&before) {
        agent.expect_no_trace(pod, before);
    }
    assert_eq!(agent.dump().len(), PODS - failed.len());

    drop(ill);
    let _well = lab.start_stand_in(Behaviour::default());
    for pod in &failed {
        agent.add(pod);
    }
    assert_eq!(agent.dump().len(), PODS);

    // A DEL tells the agent within a second or not at all.
    for pods in pods.chunks(8) {
        let deletions: Vec<_> = pods.iter().map(|pod| agent.runtime(pod).begin("DEL")).collect();
        for deletion in deletions {
            deletion.end().succeeds();
        }
    }
    let all: Vec<_> = pods.iter().collect();
    culvert_tests::within(std::time::Duration::from_secs(30), "the last trace to go", || {
        agent.traces_of_all(&all).is_empty().then_some(())
    });
    culvert_tests::eventually("descriptors as before", || {
        // Spare programs are loaded ahead, one more or less.
        (agent.descriptors().len() <= idle + 8).then_some(())
    });
    assert!(agent.dump().is_empty());
}
