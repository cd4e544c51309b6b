//! Connections that are given up in time.

use super::context::HubSettings;
use super::progress::Meter;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Checks that the Hub, or the proxy before it, accepts connections. The Hub's client itself would
/// wait as long as the operating system does.
pub(super) fn probe(hub: &HubSettings) -> Result<(), String> {
    let url = hub.proxy.as_deref().unwrap_or(&hub.endpoint);
    let (host, port) = host_and_port(url).ok_or_else(|| format!("{url} is not a URL"))?;
    let timeout = hub.connect_timeout;
    let target = host.clone();
    // Looking up the name can block for long, too, so both happen on another thread.
    let connect = move || {
        let addresses: Vec<_> = (target.as_str(), port).to_socket_addrs()?.collect();
        let mut last = std::io::ErrorKind::AddrNotAvailable.into();
        for address in addresses {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(_) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let (sender, receiver) = channel();
    // The receiver may have gone; then nobody is interested.
    thread::spawn(move || drop(sender.send(connect())));
    match receiver.recv_timeout(timeout) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("no connection to {host}: {error}")),
        Err(_) => Err(format!("no connection to {host} within {timeout:?}")),
    }
}

/// Runs `work` on a thread of its own and gives up when `meter` shows no sign of life for `stall`,
/// leaving the thread behind. A panic of the work is an error, too.
pub(super) fn supervised<T: Send + 'static>(
    stall: Duration,
    meter: &Meter,
    work: impl FnOnce(Meter) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let (sender, receiver) = channel();
    let for_work = meter.clone();
    thread::spawn(move || drop(sender.send(work(for_work))));
    let (mut events, mut since) = (meter.events(), Instant::now());
    let result = loop {
        match receiver.recv_timeout(stall.min(Duration::from_millis(200))) {
            Ok(result) => break result,
            Err(RecvTimeoutError::Disconnected) => break Err("the client failed".to_owned()),
            Err(RecvTimeoutError::Timeout) if meter.events() != events => {
                (events, since) = (meter.events(), Instant::now());
            }
            Err(RecvTimeoutError::Timeout) if since.elapsed() >= stall => {
                break Err(format!("no data for {stall:?}"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    meter.clear();
    result
}

/// Host and port of a URL with or without scheme and user.
fn host_and_port(url: &str) -> Option<(String, u16)> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let authority = rest.split(['/', '?', '#']).next()?;
    let authority = authority.rsplit('@').next()?;
    let default = match scheme {
        "https" => 443,
        "socks4" | "socks4a" | "socks5" | "socks5h" | "socks" => 1080,
        _ => 80,
    };
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            (host, port.strip_prefix(':'))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = port.map_or(Some(default), |port| port.parse().ok())?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports_of_urls() {
        for (url, expected) in [
            ("https://huggingface.co", Some(("huggingface.co", 443))),
            ("http://localhost:8080/x?y", Some(("localhost", 8080))),
            ("http://user:p%40ss@proxy:3128", Some(("proxy", 3128))),
            ("https://[::1]:9/", Some(("::1", 9))),
            ("socks5://h", Some(("h", 1080))),
            ("proxy:3128", Some(("proxy", 3128))),
            ("https://", None),
            ("http://h:99999", None),
            ("", None),
        ] {
            let found = host_and_port(url);
            let found = found.as_ref().map(|(host, port)| (host.as_str(), *port));
            assert_eq!(found, expected, "{url}");
        }
    }

    #[test]
    fn work_that_stalls_or_panics_is_given_up() {
        let stall = Duration::from_millis(50);
        let meter = Meter::hidden();
        assert_eq!(supervised(stall, &meter, |_| Ok(7)), Ok(7));
        let (_keep, wait) = channel::<()>();
        let stalled = supervised(stall, &meter, move |_| Ok(_ = wait.recv()));
        assert_eq!(stalled, Err("no data for 50ms".to_owned()));
        let alive = supervised(stall, &meter, |meter| {
            for _ in 0..10 {
                thread::sleep(Duration::from_millis(20));
                meter.advance(1);
            }
            Ok(())
        });
        assert_eq!(alive, Ok(()));
        let dead: Result<(), String> =
            supervised(stall, &meter, |_| std::panic::resume_unwind(Box::new(())));
        assert_eq!(dead, Err("the client failed".to_owned()));
    }
}
