"""Names that a stranger may write into a file."""

from __future__ import annotations

NAMES = {
    "script": "<script>alert(1)</script>",
    "end of a script": "</script><script>alert(1)</script>",
    "end of a script's data": "<!--<script>",
    "end of a comment": "--><svg onload=alert(1)>",
    "end of a title": "</title></select></style><img src=x onerror=alert(1)>",
    "end of an attribute": '"><img src=x onerror=alert(1)>',
    "attribute": "\" autofocus onfocus='alert(1)' onmouseover=\"alert(1)",
    "attribute, single quotes": "' onmouseover='alert(1)' x='",
    "address": "javascript:alert(1)",
    "link": "<a href=javascript:alert(1)>here</a>",
    "entities": "&lt;img src=x onerror=alert(1)&gt; &#0; &amp;quot; \\u003cimg\\u003e",
    "placeholders": "{{title}}{{data}}${alert(1)}`\\g<0>\\1%s{0}[bold]",
    "control characters": "a\x00\x07\x08\x1b[31m\x7f\x9b\n\r\x85z",
    "line separators": "a\u2028alert(1)\u2029z",
    "reversed": "a\u202e)1(trela\u2066 z",
    "not UTF-8": "trace-\udcff.parquet",
    "long": "name" * 2500,
}
