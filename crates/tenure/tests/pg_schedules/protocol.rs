//! Framing of PostgreSQL's messages: enough to tell where a request and its reply end, and to show both.

use std::io;

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

/// A complete request of a client: a simple query, or the messages of the extended protocol up to `Sync`.
pub(crate) struct StatementGroup {
    pub(crate) bytes: Vec<u8>,
    pub(crate) sql: String,
}

/// The complete answer to one [`StatementGroup`], up to `ReadyForQuery`.
pub(crate) struct ServerReply {
    pub(crate) bytes: Vec<u8>,
    /// Command tags, number of rows, or the error.
    pub(crate) effect: String,
    /// True if the session is inside a transaction after this answer.
    pub(crate) in_transaction: bool,
    /// Process of the session, in the first reply of a connection.
    pub(crate) pid: Option<i32>,
}

/// Reads the first message of a client, which has no type. Requests for encryption are not expected here.
pub(crate) async fn read_startup(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let mut bytes = length.to_vec();
    read_rest(stream, &mut bytes, u32::from_be_bytes(length)).await?;
    Ok(bytes)
}

/// Reads the next request; `None` if the client says goodbye or closes the connection.
pub(crate) async fn read_group(stream: &mut TcpStream) -> io::Result<Option<StatementGroup>> {
    let mut group = StatementGroup { bytes: Vec::new(), sql: String::new() };
    loop {
        let begin = group.bytes.len();
        let Some(kind) = read_message(stream, &mut group.bytes).await? else { return Ok(None) };
        let body = &group.bytes[begin + 5..];
        match kind {
            b'X' => return Ok(None),
            b'Q' => {
                group.sql = text(body);
                return Ok(Some(group));
            }
            // The name of the statement, then its text.
            b'P' => {
                let name = body.iter().position(|byte| *byte == 0).map_or(0, |end| end + 1);
                group.sql = text(&body[name..]);
            }
            b'S' => return Ok(Some(group)),
            _ => {}
        }
    }
}

/// Reads the server's answer up to `ReadyForQuery`.
pub(crate) async fn read_reply(stream: &mut TcpStream) -> io::Result<ServerReply> {
    let (mut bytes, mut effects, mut rows, mut pid) = (Vec::new(), Vec::new(), 0, None);
    loop {
        let begin = bytes.len();
        let kind = read_message(stream, &mut bytes).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let body = &bytes[begin + 5..];
        match kind {
            b'D' => rows += 1,
            b'C' => effects.push(text(body)),
            b'E' => effects.push(error(body)),
            b'K' => pid = body.first_chunk().map(|pid| i32::from_be_bytes(*pid)),
            b'Z' => {
                let in_transaction = body.first() != Some(&b'I');
                if rows > 0 && !effects.iter().any(|effect| effect.starts_with("SELECT")) {
                    effects.push(format!("{rows} returned"));
                }
                let effect = effects.join(", ");
                return Ok(ServerReply { bytes, effect, in_transaction, pid });
            }
            _ => {}
        }
    }
}

async fn read_message(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> io::Result<Option<u8>> {
    let mut head = [0; 5];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut head[1..]).await?;
    bytes.extend(head);
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    read_rest(stream, bytes, length).await?;
    Ok(Some(head[0]))
}

/// Reads the body of a message, whose length counts the length itself.
async fn read_rest(stream: &mut TcpStream, bytes: &mut Vec<u8>, length: u32) -> io::Result<()> {
    let body = usize::try_from(length).ok().and_then(|length| length.checked_sub(4));
    let begin = bytes.len();
    bytes.resize(begin + body.ok_or(io::ErrorKind::InvalidData)?, 0);
    stream.read_exact(&mut bytes[begin..]).await.map(drop)
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// SQLSTATE and message of an error: fields that each begin with a letter and end with a zero.
fn error(body: &[u8]) -> String {
    let field = |name: u8| {
        let field = body.split(|byte| *byte == 0).find(|field| field.first() == Some(&name));
        field.map(|field| text(&field[1..])).unwrap_or_default()
    };
    // The message of another incarnation ends with a time, which differs from run to run.
    let message = field(b'M');
    let message = message.split(", seen").next().unwrap_or_default();
    format!("error {} {message}", field(b'C'))
}

/// Names of statements by a part of their text. The first match counts.
const STATEMENTS: &[(&str, &str)] = &[
    ("set_config('tenure.session'", "greeting"),
    ("obj_description", "greeting"),
    ("array_agg(attname", "greeting"),
    (".effects (job, token)", "effect"),
    ("ELSE 'busy' END AS what", "claim lock"),
    ("AS may_enter", "poll lock"),
    ("pg_advisory_unlock", "release lock"),
    ("AS is_same_session", "renew lock"),
    ("(key1, key2, terms)", "count term"),
    ("objsubid = 2 AND NOT granted", "waiting?"),
    ("SELECT pg_terminate_backend(pid", "evict"),
    ("l.classid::int8 AS", "sessions?"),
    ("SET epoch = CASE WHEN (l.claim", "take"),
    ("jsonb_build_array(jsonb", "claim shared"),
    ("WITH taken AS", "claim"),
    ("r.nth IS NULL AND k.id IS NULL", "heartbeat"),
    ("passed_over FROM unnest", "renew shared"),
    ("AS passed_over", "renew"),
    ("SET locked_until = '-infinity'", "release"),
    ("WITH freed AS ( UPDATE", "release shared"),
    ("lease_token = t.lease_token + 1, attempts", "claim job"),
    ("WITH ended AS", "sweep"),
    ("ON CONFLICT (unique_key)", "enqueue"),
    ("SET completed_at = clock_timestamp()", "complete"),
    ("SET failed_at = clock_timestamp()", "fail"),
    ("SET error_message = $4", "retry"),
    ("t.id::text AS id, t.lease_token FROM", "unanswered?"),
    ("attempts = greatest(t.attempts - 1, 0) FROM unnest", "clean up"),
    ("attempts = greatest(t.attempts - 1, 0)", "release job"),
    ("t.unique_key = ANY", "existing"),
    ("WITH kept AS", "epoch"),
    ("AS failed, t.locked_by FROM", "settled?"),
];

/// Short form of a statement, for a timeline.
pub(crate) fn short(sql: &str) -> String {
    let known = STATEMENTS.iter().find(|(part, _)| sql.contains(part));
    known.map_or_else(|| sql.chars().take(24).collect(), |(_, name)| (*name).to_owned())
}

/// True for the renewals of jobs, which a worker sends by its own timer.
pub(crate) fn is_heartbeat(sql: &str) -> bool {
    short(sql) == "heartbeat"
}

/// True for the check whether a wait has begun, which a client repeats until it has. It changes nothing, and is not
/// scheduled: the number of repetitions depends on the speed of the machine.
pub(crate) fn is_wait_check(sql: &str) -> bool {
    short(sql) == "waiting?"
}

/// True for statements that only prepare others.
pub(crate) fn is_question(sql: &str) -> bool {
    matches!(
        &*short(sql),
        "greeting" | "epoch" | "existing" | "settled?" | "unanswered?" | "effect" | "sessions?"
    ) || sql.starts_with("BEGIN")
}
