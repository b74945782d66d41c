use proptest::prelude::*;

use super::*;

fn add(uid: &str, name: &str) -> Request {
    let info = WorkloadInfo {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        service_account: "sa".to_owned(),
    };
    Request::Add { uid: uid.into(), info }
}

/// Bytes as Istio's own code generators write them.
#[test]
fn the_bytes_on_the_wire_are_istios() {
    assert_eq!(encode_hello(), [0x08, 0x01]);
    assert_eq!(encode_ack(&Ack::Ok), [0x0a, 0x00]);
    assert_eq!(encode_ack(&Ack::Nack("no".into())), *b"\x0a\x04\x0a\x02no");
    assert_eq!(encode_request(&Request::SnapshotSent).unwrap(), [0x1a, 0x00]);
    assert_eq!(encode_request(&Request::Del { uid: "u".into() }).unwrap(), *b"\x12\x03\x12\x01u");
    assert_eq!(encode_request(&Request::Keep { uid: "u".into() }).unwrap(), *b"\x2a\x03\x0a\x01u");
    assert_eq!(
        encode_request(&add("u", "n")).unwrap(),
        *b"\x0a\x15\x0a\x01u\x12\x10\x0a\x01n\x12\x07default\x1a\x02sa"
    );
}

#[test]
fn a_request_of_1024_bytes_is_encoded_and_one_of_1025_is_not() {
    let overhead = encode_request(&add("u", &"n".repeat(900))).unwrap().len() - 900;
    let fits = MAX_REQUEST - overhead;
    assert_eq!(encode_request(&add("u", &"n".repeat(fits))).unwrap().len(), MAX_REQUEST);
    assert_eq!(encode_request(&add("u", &"n".repeat(fits + 1))), Err(TooLarge { size: MAX_REQUEST + 1 }));
}

#[test]
fn messages_that_lack_what_they_need_are_refused() {
    assert_eq!(decode_request(&[]), Err(DecodeError::NoPayload));
    assert_eq!(decode_request(b"\x0a\x03\x0a\x01u"), Err(DecodeError::NoInfo));
    assert_eq!(decode_ack(&[]), Err(DecodeError::NoPayload));
    assert_eq!(decode_hello(&[]), Err(DecodeError::NoVersion));
    assert_eq!(decode_hello(&[0x08, 0x00]), Err(DecodeError::NoVersion));
    assert!(matches!(decode_ack(&[0x0a]), Err(DecodeError::Malformed(_))));
}

#[test]
fn a_hello_of_a_later_version_is_taken() {
    assert_eq!(decode_hello(&[0x08, 0x02]), Ok(2));
}

fn requests() -> impl Strategy<Value = Request> {
    let uid = || ".{0,80}".prop_map(WorkloadUid::from);
    prop_oneof![
        (uid(), ".{0,300}", ".{0,80}", ".{0,300}").prop_map(|(uid, name, namespace, service_account)| {
            Request::Add { uid, info: WorkloadInfo { name, namespace, service_account } }
        }),
        uid().prop_map(|uid| Request::Keep { uid }),
        uid().prop_map(|uid| Request::Del { uid }),
        Just(Request::SnapshotSent),
    ]
}

proptest! {
    #[test]
    fn a_request_survives_the_wire_or_is_too_large(request in requests()) {
        match encode_request(&request) {
            Ok(packet) => {
                prop_assert!(packet.len() <= MAX_REQUEST);
                prop_assert_eq!(decode_request(&packet), Ok(request));
            }
            Err(TooLarge { size }) => prop_assert!(size > MAX_REQUEST),
        }
    }

    #[test]
    fn an_ack_survives_the_wire(message in ".{1,200}") {
        let nack = Ack::Nack(message);
        prop_assert_eq!(decode_ack(&encode_ack(&nack)), Ok(nack));
    }

    #[test]
    fn arbitrary_bytes_never_panic(packet in proptest::collection::vec(any::<u8>(), 0..1100)) {
        drop(decode_hello(&packet));
        drop(decode_ack(&packet));
        drop(decode_request(&packet));
    }

    /// Mutations of real messages reach further into the decoder than noise does.
    #[test]
    fn damaged_messages_never_panic(
        request in requests(), at in any::<prop::sample::Index>(), byte in any::<u8>(), keep in any::<prop::sample::Index>(),
    ) {
        if let Ok(mut packet) = encode_request(&request) {
            let index = at.index(packet.len());
            packet[index] = byte;
            packet.truncate(keep.index(packet.len()) + 1);
            drop(decode_hello(&packet));
            drop(decode_ack(&packet));
            drop(decode_request(&packet));
        }
    }
}
