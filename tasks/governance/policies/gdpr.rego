# Regulation (EU) 2016/679 (General Data Protection Regulation), consolidated text as of the date below.
# Encoded: Articles 1(3), 5(1)(b), 9(1) and (2), 44, 45, 46, 47. Not encoded: 48 and 49 (a derogation is
# for single situations, so a standing placement on one needs a waiver), the assessment of a third
# country's law that safeguards ask for, and all that is not about places and purposes. No legal advice.
package falaj.gdpr

import rego.v1

law := "GDPR, Regulation (EU) 2016/679"

as_of := "2026-11-27"

union(zone) if zone == "eu"

union(zone) if startswith(zone, "eu-")

union(zone) if zone in data.adequacy.eea.zones

personal if input.class in {"personal", "sensitive"}

safeguards := {
	"standard-contractual-clauses": "46(2)(c)",
	"binding-corporate-rules": "46(2)(b), 47",
	"code-of-conduct": "46(2)(e)",
	"certification": "46(2)(f)",
	"public-authority-instrument": "46(2)(a)",
}

special := {
	"explicit-consent": "9(2)(a)",
	"employment-law": "9(2)(b)",
	"vital-interests": "9(2)(c)",
	"legal-claims": "9(2)(f)",
	"substantial-public-interest": "9(2)(g)",
	"health-care": "9(2)(h)",
	"public-health": "9(2)(i)",
	"research": "9(2)(j)",
}

# Which basis holds for a move from a home to a zone: that of the same two names.
held(home) := {basis.basis | some basis in input.bases; basis.home == home; basis.zone == input.zone}

ground(home) := {"article": "1(3)", "rule": "gdpr-1", "says": "personal data moves freely within the Union and the EEA"} if {
	union(input.zone)
} else := {"article": "45(1)", "rule": "gdpr-45", "says": sprintf("the Commission decided that %s is adequate", [input.zone])} if {
	input.zone in data.adequacy.gdpr.zones
} else := {"article": "45(1)", "rule": "gdpr-45-part", "says": sprintf("%s is adequate for such recipients", [input.zone])} if {
	data.adequacy.gdpr.partial[input.zone] in held(home)
} else := {"article": safeguards[basis], "rule": "gdpr-46", "says": sprintf("a safeguard is recorded: %s", [basis])} if {
	basis := sort([name | some name in held(home); safeguards[name]])[0]
}

# Article 44: only where the conditions of the chapter are met.
answer contains object.union(found, {"home": home, "allow": true, "law": law, "as_of": as_of}) if {
	personal
	some home in input.homes
	union(home)
	found := ground(home)
}

answer contains {
	"home": home, "allow": false, "rule": "gdpr-44", "law": law, "as_of": as_of, "article": "44 to 46",
	"says": sprintf("%s is neither in the EEA nor adequate, and no safeguard is recorded", [input.zone]),
} if {
	personal
	some home in input.homes
	union(home)
	not ground(home)
}

# Article 5(1)(b): collected for specified purposes and not processed in a way that does not fit them.
answer contains {
	"home": home, "allow": false, "rule": "gdpr-5", "law": law, "as_of": as_of, "article": "5(1)(b)",
	"says": sprintf("the purpose %q is not among those that the data was collected for", [input.purpose]),
} if {
	personal
	some home in input.homes
	union(home)
	not input.purpose in input.purposes
}

# Article 9(1): special categories are not processed, but for the cases of 9(2).
answer contains {
	"home": home, "allow": false, "rule": "gdpr-9", "law": law, "as_of": as_of, "article": "9(1)",
	"says": "special categories of personal data, and no case of Article 9(2) is recorded",
} if {
	input.class == "sensitive"
	some home in input.homes
	union(home)
	count({basis.basis | some basis in input.bases; basis.home == home; special[basis.basis]}) == 0
}
