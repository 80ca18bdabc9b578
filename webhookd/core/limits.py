"""What a text must be that is read in one line of a log: a key, a name, a reference. As in the database."""

# No control character, as webhookd.require_label says, whose [[:cntrl:]] is these very two ranges in any
# locale; and no half of a surrogate pair, which is no text. \Z, for $ also matches before a line end.
LABEL = r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z"
# Of a reference to something that is elsewhere.
MAX_REF_CHARACTERS = 2000
