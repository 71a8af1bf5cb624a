# Federal Decree-Law No. 45 of 2021 on the Protection of Personal Data (UAE), in force since 2 January 2022.
# Encoded: Articles 5 (specific purpose), 22, 23(1)(a) and (b). Not encoded: 23(1)(c) to (f), which are for
# single acts and need a waiver; Article 2, which leaves out government, health, banking and free zones with
# laws of their own; the Executive Regulations. The zones uae-difc and uae-adgm are within the State, so no
# transfer out of it; data at home there is under the laws of difc.rego and adgm.rego. No legal advice.
package falaj.uae_pdpl

import rego.v1

law := "UAE PDPL, Federal Decree-Law 45/2021"

as_of := "2026-11-27"

state(zone) if zone == "uae"

state(zone) if startswith(zone, "uae-")

free_zones := {"uae-difc", "uae-adgm"}

covers(home) if {
	input.class in {"personal", "sensitive"}
	state(home)
	not home in free_zones
}

safeguards := {"contract": "23(1)(a)", "express-consent": "23(1)(b)"}

held(home) := {basis.basis | some basis in input.bases; basis.home == home; basis.zone == input.zone}

ground(home) := {"article": "22", "rule": "pdpl-state", "says": sprintf("%s is within the State", [input.zone])} if {
	state(input.zone)
} else := {"article": "22(1)", "rule": "pdpl-22", "says": sprintf("%s is approved as adequate", [input.zone])} if {
	input.zone in data.adequacy.uae_pdpl.zones
} else := {"article": safeguards[basis], "rule": "pdpl-23", "says": sprintf("a basis is recorded: %s", [basis])} if {
	basis := sort([name | some name in held(home); safeguards[name]])[0]
}

# Article 22: outside the State only with an adequate level of protection; Article 23: without one.
answer contains object.union(found, {"home": home, "allow": true, "law": law, "as_of": as_of}) if {
	some home in input.homes
	covers(home)
	found := ground(home)
}

answer contains {
	"home": home, "allow": false, "rule": "pdpl-outside", "law": law, "as_of": as_of, "article": "22, 23",
	"says": sprintf("%s is outside the State and not approved as adequate, and neither contract nor express consent is recorded", [input.zone]),
} if {
	some home in input.homes
	covers(home)
	not ground(home)
}

# Article 5: collected for a specific and clear purpose, and not processed against it.
answer contains {
	"home": home, "allow": false, "rule": "pdpl-5", "law": law, "as_of": as_of, "article": "5",
	"says": sprintf("the purpose %q is not among those that the data was collected for", [input.purpose]),
} if {
	some home in input.homes
	covers(home)
	not input.purpose in input.purposes
}
