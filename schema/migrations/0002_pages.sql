-- Owns: the indexes that lists are paged by, each in the order in which a list shows its rows. Runs as webhookd_owner.
--
-- Built inside the migration's one transaction: who writes to events, sagas or dead letters waits until it commits, longer the
-- more rows there are (not measured). The transaction waits three seconds at the most for a table, and then changes nothing.

-- A page's rows and no others: the id ends the order, so that rows of one time, as of one batch, need no sorting.
drop index webhookd.idx_event_type;
create index idx_event_type on webhookd.events (event_type, created_at, id);

-- Dead letters, in the order of their time, which is also what they are filtered by: an id says nearly the same, and a window
-- of time that is nearly right leaves rows out. They are written once and never change, so an index more costs little.
drop index webhookd.idx_dead_subscription;
create index idx_dead_subscription on webhookd.dead_letters (subscription_id, failed_at, id);
drop index webhookd.idx_dead_error;
create index idx_dead_error on webhookd.dead_letters (final_error_code, failed_at, id);
create index idx_dead_subscription_error on webhookd.dead_letters (subscription_id, final_error_code, failed_at, id);

-- The deliveries of one subscription, in any status: what is asked first when a customer calls, and most of all while that
-- one's backlog is long. On the hottest table, so measured: the whole cycle without HTTP, 14 alternating rounds of 6,000
-- deliveries beside 400,000, took about a tenth more of the server's CPU time (medians 1.07 to 1.13 for three variants, single
-- rounds 0.74 to 1.35, so hardly more than noise) and 1.09 to 1.11 times the WAL.
-- With status, though (subscription_id, id) costs as much: else one success before a year of failures takes a walk through
-- all of them.
create index idx_saga_subscription_status on webhookd.webhook_delivery_sagas (subscription_id, status, id);

-- Completed ones too, though they are nearly all: after a long outage none is near. One entry more for each delivery, 2 %
-- of the WAL.
drop index webhookd.idx_saga_status;
create index idx_saga_status on webhookd.webhook_delivery_sagas (status, id);
