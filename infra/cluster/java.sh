#!/bin/sh
# Prints a JAVA_HOME for Spark: the caller's, that of the java on PATH, or that of Debian's package,
# which is unpacked into a folder, without root:  java.sh FOLDER
set -eu
if [ -n "${JAVA_HOME:-}" ]; then echo "$JAVA_HOME"; exit; fi
if found=$(command -v java); then dirname "$(dirname "$(readlink -f "$found")")"; exit; fi
into=$1
if [ ! -e "$into/complete" ]; then
  rm -rf "$into" && mkdir -p "$into" && cd "$into"
  { apt-get -qq download openjdk-21-jre-headless || apt-get -qq download openjdk-17-jre-headless; } 1>&2 || {
    echo "There is no Java, and apt-get could not fetch one. Install Java 17 or newer, or name it by JAVA_HOME." >&2
    exit 1
  }
  dpkg -x ./*.deb . && rm ./*.deb
  # Its settings are links to /etc, which is elsewhere here.
  find . -type l -lname '/etc/*' | while read -r link; do ln -sf "$PWD$(readlink "$link")" "$link"; done
  touch complete
fi
echo "$into"/usr/lib/jvm/java-??-openjdk-*
