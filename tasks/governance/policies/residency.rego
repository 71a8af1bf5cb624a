# What holds before any law: the owner's own rules of residency. No legal advice.
#
# Every file here adds to the set `answer` of its package. The input is one placement: what is placed, its
# class, its homes, the zone of the place, the purpose, the purposes that the data was collected for, and
# the bases that hold today. For each home some answer has to allow it, and none may refuse it; where no
# answer allows it, it is refused.
package falaj.residency

import rego.v1

law := "Own rules of residency"

as_of := "2026-11-27"

inside(zone, home) if zone == home

inside(zone, home) if startswith(zone, concat("", [home, "-"]))

# Data that has a home goes nowhere that nobody has named.
answer contains {
	"home": home, "allow": false, "rule": "own-unknown", "law": law, "as_of": as_of, "article": "rule 1",
	"says": "no zone is declared for this address, and data with a home goes to known zones alone",
} if {
	some home in input.homes
	input.zone == "unknown"
}

# Data may be where it is at home; a part of a home, as eu-de of eu, is in it.
answer contains {
	"home": home, "allow": true, "rule": "own-home", "law": law, "as_of": as_of, "article": "rule 2",
	"says": sprintf("%s is in the home zone %s", [input.zone, home]),
} if {
	some home in input.homes
	inside(input.zone, home)
}

# Public data may be anywhere that is known.
answer contains {
	"home": home, "allow": true, "rule": "own-public", "law": law, "as_of": as_of, "article": "rule 3",
	"says": "public data may be in any known zone",
} if {
	some home in input.homes
	input.class == "public"
	input.zone != "unknown"
}

# Data that is no person's leaves its home where its owner has decided so.
answer contains {
	"home": home, "allow": true, "rule": "own-decision", "law": law, "as_of": as_of, "article": "rule 4",
	"says": sprintf("the owner decided that internal data of %s may be in %s", [home, input.zone]),
} if {
	some home in input.homes
	input.class == "internal"
	some basis in input.bases
	basis.home == home
	basis.zone == input.zone
	basis.basis == "owner-decision"
}

