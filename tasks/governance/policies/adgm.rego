# ADGM Data Protection Regulations 2021, in force since 14 February 2021.
# Encoded: sections 4 (specified purposes), 40, 41 and 42. Not encoded: the derogations for specific
# situations of Part V, which need a waiver, and section 7 (special categories). The rest of the UAE is
# outside the ADGM. No legal advice.
package falaj.adgm

import rego.v1

law := "ADGM Data Protection Regulations 2021"

as_of := "2026-11-27"

covers(home) if {
	input.class in {"personal", "sensitive"}
	home == "uae-adgm"
}

adequate(zone) if zone in data.adequacy.adgm.zones

adequate(zone) if {
	data.adequacy.adgm.eea
	zone in data.adequacy.eea.zones
}

adequate(zone) if {
	data.adequacy.adgm.eea
	zone == "eu"
}

adequate(zone) if {
	data.adequacy.adgm.eea
	startswith(zone, "eu-")
}

safeguards := {
	"standard-contractual-clauses": "42",
	"binding-corporate-rules": "42",
	"code-of-conduct": "42",
	"certification": "42",
	"public-authority-instrument": "42",
}

held(home) := {basis.basis | some basis in input.bases; basis.home == home; basis.zone == input.zone}

ground(home) := {"article": "40", "rule": "adgm-home", "says": sprintf("it stays in %s", [home])} if {
	input.zone == home
} else := {"article": "41(1)", "rule": "adgm-41", "says": sprintf("the Commissioner takes %s as adequate", [input.zone])} if {
	adequate(input.zone)
} else := {"article": safeguards[basis], "rule": "adgm-42", "says": sprintf("a safeguard is recorded: %s", [basis])} if {
	basis := sort([name | some name in held(home); safeguards[name]])[0]
}

# Out of the zone only on a decision of adequacy or with a safeguard.
answer contains object.union(found, {"home": home, "allow": true, "law": law, "as_of": as_of}) if {
	some home in input.homes
	covers(home)
	found := ground(home)
}

answer contains {
	"home": home, "allow": false, "rule": "adgm-outside", "law": law, "as_of": as_of, "article": "40 to 42",
	"says": sprintf("%s is not adequate, and no safeguard is recorded", [input.zone]),
} if {
	some home in input.homes
	covers(home)
	not ground(home)
}

# Collected for specified purposes.
answer contains {
	"home": home, "allow": false, "rule": "adgm-4", "law": law, "as_of": as_of, "article": "4",
	"says": sprintf("the purpose %q is not among those that the data was collected for", [input.purpose]),
} if {
	some home in input.homes
	covers(home)
	not input.purpose in input.purposes
}
