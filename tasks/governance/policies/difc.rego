# DIFC Law No. 5 of 2020 (Data Protection Law), in force since 1 July 2020, as amended by law no. 1 of 2025.
# Encoded: Articles 9 (specified purposes), 26 and 27(2). Not encoded: 27(3) and (4), which are for single
# cases and need a waiver; 28 (government authorities); 11 (special categories). The rest of the UAE is
# outside the DIFC. No legal advice.
package falaj.difc

import rego.v1

law := "DIFC Data Protection Law, No. 5 of 2020"

as_of := "2026-11-27"

covers(home) if {
	input.class in {"personal", "sensitive"}
	home == "uae-difc"
}

adequate(zone) if zone in data.adequacy.difc.zones

adequate(zone) if {
	data.adequacy.difc.eea
	zone in data.adequacy.eea.zones
}

adequate(zone) if {
	data.adequacy.difc.eea
	zone == "eu"
}

adequate(zone) if {
	data.adequacy.difc.eea
	startswith(zone, "eu-")
}

safeguards := {
	"standard-contractual-clauses": "27(2)(c)",
	"binding-corporate-rules": "27(2)",
	"code-of-conduct": "27(2)",
	"certification": "27(2)",
	"public-authority-instrument": "27(2)",
}

held(home) := {basis.basis | some basis in input.bases; basis.home == home; basis.zone == input.zone}

ground(home) := {"article": "26", "rule": "difc-home", "says": sprintf("it stays in %s", [home])} if {
	input.zone == home
} else := {"article": "26(1)", "rule": "difc-26", "says": sprintf("the Commissioner takes %s as adequate", [input.zone])} if {
	adequate(input.zone)
} else := {"article": safeguards[basis], "rule": "difc-27", "says": sprintf("a safeguard is recorded: %s", [basis])} if {
	basis := sort([name | some name in held(home); safeguards[name]])[0]
}

# Out of the zone only on a decision of adequacy or with a safeguard.
answer contains object.union(found, {"home": home, "allow": true, "law": law, "as_of": as_of}) if {
	some home in input.homes
	covers(home)
	found := ground(home)
}

answer contains {
	"home": home, "allow": false, "rule": "difc-outside", "law": law, "as_of": as_of, "article": "26, 27",
	"says": sprintf("%s is not adequate, and no safeguard is recorded", [input.zone]),
} if {
	some home in input.homes
	covers(home)
	not ground(home)
}

# Collected for specified purposes.
answer contains {
	"home": home, "allow": false, "rule": "difc-9", "law": law, "as_of": as_of, "article": "9",
	"says": sprintf("the purpose %q is not among those that the data was collected for", [input.purpose]),
} if {
	some home in input.homes
	covers(home)
	not input.purpose in input.purposes
}
