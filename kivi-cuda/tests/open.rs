//! Opening a device where there is none.

use kivi_cuda::{CudaOptions, open};

#[test]
fn one_line_says_what_is_missing() {
    match open(&CudaOptions::default()) {
        Ok(_) => println!("skipped: there is an NVIDIA device"),
        Err(error) => {
            let message = error.to_string();
            println!("{message}");
            let start = "opening the device failed on cuda: ";
            assert!(message.starts_with(start) && !message.contains('\n'), "{message}");
        }
    }
}
