//! A snapshot is refused, or written again byte for byte.
#![no_main]

use kivi_core::Snapshot;
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};

fuzz_target!(|file: &[u8]| {
    read(file);
    // Random bytes do not get past the checksums.
    let mut sealed = file.to_vec();
    let header = file.get(12..16).and_then(|length| length.try_into().ok());
    let Some(header) = header.map(|length| u32::from_le_bytes(length) as usize) else { return };
    for at in [header.saturating_add(16), file.len().saturating_sub(32)] {
        let end = at.saturating_add(32);
        if end <= sealed.len() {
            let digest = Sha256::digest(&sealed[..at]);
            sealed[at..end].copy_from_slice(&digest);
        }
    }
    read(&sealed);
});

fn read(file: &[u8]) {
    match Snapshot::read_from(file) {
        Ok(snapshot) => {
            let mut written = Vec::new();
            snapshot.write_to(&mut written).expect("memory takes everything");
            assert!(written == file);
            let (header, layers) = (snapshot.header().clone(), snapshot.layers().to_vec());
            Snapshot::new(header, layers).expect("what was read is valid");
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
}
