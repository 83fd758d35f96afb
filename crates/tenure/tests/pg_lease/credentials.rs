//! Passwords that are replaced, and roles that may not log in for a while: a store that worked before waits for access.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tenure::election::{Election, ElectionState, Event, StopReason};
use tenure::{Client, ErrorKind, StoreOutage};

use crate::server::Server;
use crate::support::until;

const TTL: Duration = Duration::from_secs(3);
/// End of every session of the role, as an operator does it.
const END_SESSIONS: &str =
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'locked_out'";

/// A server with a role whose password is in a file.
struct Place {
    server: Server,
    passfile: PathBuf,
}

impl Place {
    /// A server whose role `locked_out` has the password `first`, and a table of locks.
    async fn new() -> Option<Self> {
        let server = Server::start()?;
        server.sql("CREATE ROLE locked_out SUPERUSER LOGIN PASSWORD 'first'");
        let store = tenure::PgLeaseStore::open(&server.url()).unwrap();
        store.apply_schema().await.unwrap();
        let passfile = server.folder().join("passwords");
        let place = Self { server, passfile };
        place.write_password("first");
        Some(place)
    }

    fn write_password(&self, password: &str) {
        // Replaced in one step, as tools that rotate passwords do.
        let new = self.passfile.with_extension("new");
        fs::write(&new, format!("*:*:*:locked_out:{password}\n")).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(&new, &self.passfile).unwrap();
    }

    async fn client(&self, scheme: &str) -> Client {
        let (port, passfile) = (self.server.port, self.passfile.display());
        let url = format!("{scheme}://locked_out@127.0.0.1:{port}/postgres?passfile={passfile}");
        Client::connect(&url).await.unwrap()
    }

    /// A client whose store has worked once.
    async fn settled_client(&self, scheme: &str) -> Client {
        let client = self.client(scheme).await;
        client.inspect("key").await.unwrap();
        client
    }

    /// Ends all sessions of the role, also those that are being opened at this moment.
    async fn end_sessions(&self) {
        until("the sessions are gone", async || self.server.sql(END_SESSIONS) == "0").await;
    }

    async fn participants(&self, scheme: &str) -> Vec<Participant> {
        let mut participants = Vec::new();
        for _ in 0..3 {
            let reports = Arc::new(Mutex::new(Vec::new()));
            let told = Arc::clone(&reports);
            let election = self.settled_client(scheme).await.election("key").ttl(TTL);
            let election =
                election.on_outage(move |outage| told.lock().unwrap().push(outage.clone()));
            participants.push(Participant { election: election.start().await.unwrap(), reports });
        }
        participants
    }
}

struct Participant {
    election: Election,
    reports: Arc<Mutex<Vec<StoreOutage>>>,
}

impl Participant {
    fn heard(&self, report: impl Fn(&StoreOutage) -> bool) -> bool {
        self.reports.lock().unwrap().iter().any(report)
    }

    fn heard_of_denial(&self) -> bool {
        self.heard(|report| match report {
            StoreOutage::Away { reason: Some(reason), .. } => reason.contains("rejected the user"),
            _ => false,
        })
    }
}

async fn until_led(participants: &[Participant]) -> usize {
    until("a leader", async || participants.iter().any(|it| it.election.is_leader())).await;
    participants.iter().position(|it| it.election.is_leader()).unwrap_or_default()
}

/// Denies access to a leader and two followers on each store, and grants it again once all have reported it.
async fn leadership_goes_on(deny: &str, grant: impl FnOnce(&Place)) {
    let Some(place) = Place::new().await else { return };
    let mut stores = Vec::new();
    for scheme in SCHEMES {
        let participants = place.participants(scheme).await;
        until_led(&participants).await;
        stores.push(participants);
    }
    place.server.sql(deny);
    place.end_sessions().await;
    let all_heard = async || stores.iter().flatten().all(Participant::heard_of_denial);
    until("the reports of the denial", all_heard).await;
    let leads = stores.iter().flatten().any(|it| it.election.is_leader());
    assert!(!leads, "no session is left, and the leases have ended");
    grant(&place);
    let begun = Instant::now();
    for (scheme, participants) in SCHEMES.into_iter().zip(&stores) {
        let leader = &participants[until_led(participants).await];
        println!("{scheme}: led {:.1?} after access was granted", begun.elapsed());
        let back = async || leader.heard(|it| matches!(it, StoreOutage::Back { .. }));
        until("the report of the end", back).await;
        for Participant { election, .. } in participants {
            assert_ne!(election.state(), ElectionState::Stopped);
            election.shutdown(None).await.unwrap();
        }
    }
}

const SCHEMES: [&str; 2] = ["postgres+advisory", "postgres"];
const ROTATE: &str = "ALTER ROLE locked_out PASSWORD 'second'";
const NOLOGIN: &str = "ALTER ROLE locked_out NOLOGIN";

#[tokio::test(flavor = "multi_thread")]
async fn elections_survive_a_new_password() {
    leadership_goes_on(ROTATE, |place| place.write_password("second")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn elections_survive_a_time_without_login() {
    let grant = |place: &Place| drop(place.server.sql("ALTER ROLE locked_out LOGIN"));
    leadership_goes_on(NOLOGIN, grant).await;
}

/// The new password is in its file before the sessions end, so no participant is ever denied.
#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_was_replaced_in_time_is_never_denied() {
    let Some(place) = Place::new().await else { return };
    let participants = place.participants("postgres+advisory").await;
    let first = until_led(&participants).await;
    let token = participants[first].election.fencing_token();
    place.server.sql(ROTATE);
    place.write_password("second");
    place.server.sql(END_SESSIONS);
    let next = async || participants.iter().any(|it| it.election.fencing_token() > token);
    until("the next leader", next).await;
    for participant in &participants {
        assert!(!participant.heard_of_denial());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_acquire_survives_a_new_password_unless_it_must_fail_fast() {
    let Some(place) = Place::new().await else { return };
    let mut waiting = Vec::new();
    for scheme in SCHEMES {
        let holder = place.server.url().replacen("postgres", scheme, 1);
        let holder = Client::connect(&holder).await.unwrap();
        let guard = holder.lock("key").ttl(TTL).acquire().await.unwrap();
        let request = place.settled_client(scheme).await.lock("key").ttl(TTL);
        let hasty = tokio::spawn(request.fail_fast().acquire());
        let reports = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&reports);
        let request = place.settled_client(scheme).await.lock("key").ttl(TTL);
        let tell = move |outage: &StoreOutage| told.lock().unwrap().push(outage.to_string());
        let patient = tokio::spawn(request.on_outage(tell).acquire());
        waiting.push((guard, hasty, patient, reports));
    }
    place.server.sql(ROTATE);
    place.end_sessions().await;
    for (_, hasty, patient, reports) in &mut waiting {
        let error = hasty.await.unwrap().unwrap_err();
        // A session that ended while it waited may have been granted the lock: that is said first.
        let kind = error.kind();
        assert!(matches!(kind, ErrorKind::Denied | ErrorKind::Unknown), "{}", error.chain());
        assert!(error.chain().contains("rejected the user"), "{}", error.chain());
        let denial = |report: &String| report.contains("rejected the user");
        let reported = async || reports.lock().unwrap().iter().any(denial);
        until("the report of the denial", reported).await;
        assert!(!patient.is_finished());
    }
    place.write_password("second");
    for (guard, _, patient, _) in waiting {
        guard.release().await.unwrap();
        patient.await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_election_that_must_fail_fast_stops_at_a_later_denial() {
    let Some(place) = Place::new().await else { return };
    let mut elections = Vec::new();
    for scheme in SCHEMES {
        let client = place.client(scheme).await;
        let election = client.election("key").ttl(TTL).fail_fast().build().unwrap();
        let events = election.events();
        election.start().await.unwrap();
        assert!(election.wait_for_leadership(TTL * 10).await.unwrap());
        elections.push((election, events));
    }
    place.server.sql(NOLOGIN);
    place.end_sessions().await;
    for (_election, mut events) in elections {
        let stopped = async {
            loop {
                if let Event::Stopped(reason) = events.next().await.unwrap() {
                    return reason;
                }
            }
        };
        match tokio::time::timeout(Duration::from_secs(60), stopped).await.unwrap() {
            StopReason::Failed(error) => assert_eq!(error.kind(), ErrorKind::Denied, "{error}"),
            reason => panic!("{reason}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_at_the_start_ends_at_once() {
    let Some(place) = Place::new().await else { return };
    for scheme in SCHEMES {
        place.write_password("wrong");
        let client = place.client(scheme).await;
        let error = client.lock("key").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        // The same store works once its password is right.
        place.write_password("first");
        client.lock("key").acquire().await.unwrap().release().await.unwrap();
    }
}
