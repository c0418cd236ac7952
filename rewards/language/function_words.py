"""Function words in many languages. They distinguish running text from code and formulas."""

from __future__ import annotations

_KEYWORDS = """
and as assert async await begin between bool boolean break by byte case catch char class const
continue create def default define del delete distinct do done double drop echo elif else end enum
except exists extends false final finally float fn for foreach from function global group having
if impl implements import in include inner insert int integer interface into is join key lambda
left let like limit long match mod mut namespace new nil none not null object on or order outer
package pass print private protected pub public raise range return right select self set short
signed sizeof static std str string struct super switch table template then this throw true try
type typedef typename union unsigned update use using val values var vector virtual void where
while with xor yield
"""
_FUNCTION_WORDS = """
a about all also an are at be because been but can could has have he her his how i it its let's
more must no now of one our she should so some than that the their them there these they to was we
were what when which who will would you your

aber als auch auf aus bei bis da das dass dem den der des die durch ein eine einem einen einer er
es für hat ich ihr ihre im ist kann man mit nach nicht noch nun nur oder sich sie sind so um und
uns vom von vor war was wenn wie wir wird zu zum zur

au aux avec car ce ces cette dans de des donc du elle en est et être il ils je la le les leur mais
ne nous ont ou où par pas plus pour puis qu que qui sa se ses son sont sur un une

al como con cuando del desde e el ella entonces esta este las lo los más muy no para pero por
porque se ser si sin su sus también una y ya

ao aos com da das dos ele ela então foi isso já mais mas na nas não no nos os ou pela pelo quando
que são sem seu sua também um uma

anche che chi ci come con cui dalla dei del della delle di dove gli ha il la le loro ma nel nella
non ogni per perché più poi quando questo si sono sua suo tra una uno

ale bo być co czy dla do gdy i ich jak jest już która które który ma na nie o od po przez się są
tak tego to tym w więc z za ze że

aan bij dan dat de deze die dit door een en er haar heeft het hij ik in is maar met naar niet nog
nu of om ook op over te toch uit van voor was wat we werd wij zal ze zich zijn

att av blir den det ett för från han hon inte jag kan man med men när och om på så som till var vi
än är

bir bu çok da daha de en gibi için ile ise kadar ki mi ne o olan olarak sonra ve veya ya

ada adalah akan atau bahwa dalam dan dari dengan di ini itu juga ke kita maka oleh pada sebagai
tidak untuk yang
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Keywords of programming languages. Many of them are also English words, so they do not indicate
running text."""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split()) - KEYWORDS
"""Function words in English, German, French, Spanish, Portuguese, Italian, Polish, Dutch, Swedish,
Turkish and Indonesian."""
COMMANDS = frozenset({"because", "chi", "det", "hat", "le", "ne", "nu", "sin", "to"})
"""Function words that are also names of LaTeX commands."""
